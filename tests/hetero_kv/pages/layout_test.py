"""Sizes of pages, and what they waste."""

import pytest

from hetero_kv.contract import History, LayerSpec, Leaf
from hetero_kv.pages.layout import Paging, compare_with_uniform, history_slots
from tests.hetero_kv import synthetic

SPEC = synthetic.everything()  # blocks of 8 tokens
NAMES = ["csa entries", "csa index keys", "nsa entries", "full kv"]


def test_default_pages_are_blocks() -> None:
    paging = Paging.of(SPEC, batch=3, capacity=40)
    assert [x.component for x in paging.pages] == NAMES == list(history_slots(SPEC))
    assert [(x.span, x.entries) for x in paging.pages] == [(8, 2), (8, 2), (8, 2), (8, 8)]
    assert [x.count for x in paging.pages] == [15, 15, 15, 15]
    assert [x.columns for x in paging.pages] == [6, 5, 5, 5]  # tiles of 4 entries: 12 rows
    assert paging.shared_span == 8
    entries = paging.page("csa entries")
    assert entries.bytes == 2 * 2 * 3 * 4  # layers, entries, width, bytes
    assert [entries.pages_for(n) for n in (0, 3, 4, 8, 11, 12, 40)] == [0, 0, 1, 1, 1, 2, 5]
    nsa = paging.page("nsa entries")  # an entry of 8 tokens begins every 4
    assert [nsa.pages_for(n) for n in (7, 8, 12, 15, 16)] == [0, 1, 1, 1, 2]
    want = sum(x.count * x.bytes for x in paging.pages)
    assert paging.pool_bytes == want


def test_components_have_their_own_spans_and_pools() -> None:
    paging = Paging.of(SPEC, 2, 64, span={"full kv": 4, "csa entries": 32}, count={"full kv": 9})
    assert [x.span for x in paging.pages] == [32, 8, 8, 4]
    assert [x.entries for x in paging.pages] == [8, 2, 2, 4]
    assert paging.page("full kv").count == 9
    assert paging.shared_span == 32


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(span=6), "'csa entries': a page of 6 tokens is not a multiple of the stride 4"),
        (dict(span={"full kv": 12}), "neither holds whole blocks nor divides one"),
        (dict(span={"full kv": -8}), "span full kv is an integer >= 1, got -8"),
        (dict(span=16.0), "span is an integer >= 1, got 16.0"),
        (dict(count={"full kv": 2.5}), "count full kv is an integer >= 1, got 2.5"),
        (dict(span={"kv": 8}), r"no components with history: \['kv'\]"),
        (dict(count=0), "count is an integer >= 1, got 0"),
        (dict(count={"full kv": 2**31}), "pages"),
    ],
)
def test_sizes_that_make_no_sense(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Paging.of(SPEC, 2, 64, **sizes)


def test_leaves_of_a_component_have_one_stride() -> None:
    def layer(stride: int) -> LayerSpec:
        leaf = Leaf(contract=History(stride), component="entries", width=(2,))
        return LayerSpec("x", (("entries", leaf),))

    with pytest.raises(ValueError, match="one stride"):
        Paging.of(synthetic.only(layer(4), layer(2)), 1, 16)


def test_waste_beside_uniform_pages() -> None:
    paging = Paging.of(SPEC, 2, 64)
    # Of 10 tokens: 2 of 2 entries (24 and 16 bytes each, 2 layers), 1 of nsa, 10 rows of 8 bytes.
    waste = compare_with_uniform(SPEC, paging, [10])
    assert waste.used == 2 * (2 * 12 + 2 * 8 + 1 * 8) + 10 * 8
    assert waste.own == 2 * (0 + 0 + 1 * 8) + 6 * 8
    assert waste.uniform_bytes == 8 * 8  # the page of full attention
    pages = 2 * (1 + 1 + 1) + 2  # of 5, 8, 8 and 8 entries
    assert waste.uniform == pages * 64 - waste.used
    assert compare_with_uniform(SPEC, paging, []).own == 0
    assert compare_with_uniform(SPEC, paging, [10], uniform_bytes=16).uniform < waste.uniform
    with pytest.raises(ValueError, match="cannot hold one row"):
        compare_with_uniform(SPEC, paging, [10], uniform_bytes=4)
