"""What a layer holds: by hand at one length, and against a cache that ran."""

import dataclasses

import jax
import numpy as np
import pytest

import models
from experiments import anatomy
from experiments.anatomy import ENTRY, STATE, TAIL, TOKEN, WINDOW
from hetero_kv.contract import Evidence
from tests.models import families


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return models.build(anatomy.example())


def test_rows_by_hand(model: models.Decoder) -> None:
    held = {(x.kind, x.component): x for x in anatomy.rows_of(model.cache_spec, 37)}
    # Ring rows of the last 7 positions before the next one; the current token included, 8 wide.
    window = held["swa", "windows"]
    assert window.form == WINDOW and window.spans == tuple((p, p) for p in range(30, 37))
    entries = held["csa", "csa entries"]
    assert entries.form == ENTRY and entries.spans == tuple((4 * i, 4 * i + 3) for i in range(9))
    assert held["csa", "csa index keys"].spans == entries.spans
    # One open row of the tenth group, and the group before it, which overlaps.
    tail = next(x for x in anatomy.rows_of(model.cache_spec, 37) if x.kind == "csa"
                and x.form == TAIL)  # fmt: skip
    assert tail.spans == tuple((p, p) for p in range(32, 37))
    heavy = held["hca", "hca entries"]
    assert heavy.spans == ((0, 15), (16, 31)) and heavy.nbytes == 2 * 16 * 4
    rows = next(x for x in held.values() if x.kind == "full")
    assert rows.form == TOKEN and len(rows.spans) == 37 and rows.nbytes == 37 * 2 * 2 * 16 * 4
    state = held["gated_delta", "gated_delta state"]
    assert state.form == STATE and not state.spans and state.nbytes == 2 * 8 * 8 * 4
    by_form = anatomy.bytes_by_form(list(held.values()))
    assert by_form[STATE] == state.nbytes and set(by_form) <= set(anatomy.COLOUR)
    with pytest.raises(ValueError, match="length=0"):
        anatomy.rows_of(model.cache_spec, 0)


@pytest.mark.full
def test_a_cache_that_ran_holds_what_is_drawn(model: models.Decoder) -> None:
    spec, params = model.cache_spec, model.init(jax.random.key(0))
    tokens = np.arange(37, dtype=np.int32)[None] % 64
    cache = model.init_cache(1, 48)
    assert not anatomy.differences(spec, cache)
    _, cache = model.prefill(params, tokens, cache, logits="none")
    assert not anatomy.differences(spec, cache)
    # Evidence that is one token behind is a difference in every leaf that it vouches for.
    evidence = [x for x in spec.slots() if isinstance(x.leaf.contract, Evidence)]
    old = {x: cache.leaf(x) - 1 for x in evidence}
    assert len(anatomy.differences(spec, cache.with_leaves(old))) == len(evidence)


@pytest.mark.parametrize("name", families.every())
def test_every_family_has_an_anatomy(name: str) -> None:
    spec = families.model(name)[0].cache_spec
    held = anatomy.rows_of(spec, 61)
    assert {x.layer for x in held} == set(range(len(list(spec.layers()))))
    assert all(0 <= first <= last < 61 for x in held for first, last in x.spans)
    assert all(len(x.spans) <= x.rows for x in held)


def test_figures(model: models.Decoder, tmp_path) -> None:
    spec = model.cache_spec
    held = anatomy.rows_of(spec, 37)
    figure = anatomy.draw([dataclasses.asdict(x) for x in held], 37)
    (axis,) = figure.axes
    assert [x.get_text() for x in axis.get_yticklabels()] == [
        f"{x.layer} {x.kind}: {x.component}" for x in held
    ]
    figure.savefig(tmp_path / "a.png")
    growth = anatomy.draw_growth(spec, (64, 256, 1_024))
    lines = {x.get_label(): x.get_ydata() for x in growth.axes[0].lines}
    assert len(set(lines[WINDOW])) == 1 and len(set(lines[STATE])) == 1
    assert lines[TOKEN][2] == 16 * lines[TOKEN][0]
    axis = growth.add_subplot()
    window = next(x.leaf for x in spec.slots() if x.leaf.component == "windows")
    anatomy.draw_ring(axis, window, range(1, 21))
    shown = axis.images[0].get_array()
    assert shown[:, -1].tolist()[:3] == [16.0, 17.0, 18.0] and shown.shape == (8, 20)
