"""Page copies against a numpy oracle: which pages, which bytes, which checksums."""

import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.kernels.page_copy import api, pallas_gpu, pallas_tpu
from tests import variants
from tests.hetero_kv.kernels import memory, strict

PAGES, SALT = 5, 7 << 16
DTYPES = ("float32", "bfloat16", "uint8")  # bytes: quantised rows


class Case(NamedTuple):
    """One call: pages [L, P, e, w] of which only what may be read is finite."""

    pages: np.ndarray
    staged: np.ndarray
    ids: np.ndarray
    generation: np.ndarray
    expected: np.ndarray

    @property
    def fresh(self) -> np.ndarray:
        return np.array(
            [
                0 <= i < PAGES and self.generation[i] == want
                for i, want in zip(self.ids, self.expected, strict=True)
            ]
        )


def make(seed: int, dtype: str, entries: int = 8, width: int = 32, ids: int = 6) -> Case:
    """Ids beyond the pool on both sides, stale ones, and (of pages that are read) repeated ones."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(np.arange(-2, PAGES + 2))[:ids].astype(np.int32)
    generation = rng.integers(0, 3, PAGES).astype(np.int32)
    expected = generation[np.clip(chosen, 0, PAGES - 1)] + (rng.random(ids) < 0.3)

    def numbers(*shape: int) -> np.ndarray:
        if dtype == "uint8":
            return rng.integers(0, 256, shape).astype(np.uint8)
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    case = Case(
        numbers(2, PAGES, entries, width),
        numbers(2, ids, entries, width),
        chosen,
        generation,
        expected.astype(np.int32),
    )
    poisoned = np.setdiff1d(np.arange(PAGES), chosen[case.fresh])
    case.pages[:, poisoned] = 255 if dtype == "uint8" else np.nan
    return case


def checksum(page: np.ndarray, salt: int) -> int:
    """The checksum of one page in one layer, word by word with Python's integers."""
    top = 1 << 32

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B % top
        x = (x ^ x >> 13) * 0xC2B2AE35 % top
        return x ^ x >> 16

    words = page.reshape(-1).view(f"uint{8 * page.dtype.itemsize}")
    salted = mix(salt + 1)
    return sum(mix((int(x) + i * 0x9E3779B1 + salted) % top) for i, x in enumerate(words)) % top


def sums(staged: np.ndarray) -> np.ndarray:
    """Of pages [L, k, e, w]."""
    return np.array(
        [
            sum(checksum(staged[layer, i], SALT + layer) for layer in range(len(staged)))
            % (1 << 32)
            for i in range(staged.shape[1])
        ]
    )


def gathered(case: Case) -> np.ndarray:
    out = np.zeros((2, len(case.ids), *case.pages.shape[2:]), case.pages.dtype)
    out[:, case.fresh] = case.pages[:, case.ids[case.fresh]]
    return out


def scattered(case: Case) -> np.ndarray:
    out = case.pages.copy()
    out[:, case.ids[case.fresh]] = case.staged[:, case.fresh]
    return out


def same(got, want: np.ndarray) -> None:
    got = np.asarray(got)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def check(case: Case, out: api.Gathered, new: api.Scattered, seen: api.Verified) -> None:
    want = gathered(case)
    same(out.staged, want)
    same(new.pages, scattered(case))
    for result in (out, new, seen):
        np.testing.assert_array_equal(result.fresh, case.fresh)
    np.testing.assert_array_equal(out.sums, sums(want))
    np.testing.assert_array_equal(seen.sums, sums(want))
    np.testing.assert_array_equal(new.sums, sums(case.staged))


def on_device(case: Case) -> Case:
    return Case(*map(jnp.asarray, case))


@functools.partial(jax.jit, static_argnames="implementation")
def run(case: Case, implementation: str = "auto"):
    about = case.ids, case.generation, case.expected
    options = {"salt": SALT, "implementation": implementation}
    return (
        api.gather(case.pages, *about, **options),
        api.scatter(case.pages, case.staged, *about, **options),
        api.verify(case.pages, *about, **options),
    )


@hypothesis.settings(max_examples=10)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_against_the_oracle(seed: int, dtype: str) -> None:
    case = make(seed, dtype)
    check(case, *run(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tpu_kernel(dtype: str) -> None:
    for seed in (0, 1):
        case = make(seed, dtype)
        check(case, *strict.tpu(lambda case=case: run(case, "interpret")))


def test_tpu_kernel_in_tiles(monkeypatch) -> None:
    monkeypatch.setattr(pallas_tpu, "BLOCK_BYTES", 8 * 32 * 4)
    case = make(2, "float32", entries=24)
    assert pallas_tpu.tiles(case.pages).rows == 8
    # Not `run`, whose compilations are kept.
    check(case, *strict.tpu(lambda: run.__wrapped__(on_device(case), "interpret")))


def _on_gpu(case: Case, interpreter) -> tuple:
    target = np.where(case.fresh, case.ids, PAGES).astype(np.int32)
    about = target, jnp.uint32(SALT), interpreter
    staged, staged_sums = pallas_gpu.gather(case.pages, *about)
    pages, new_sums = pallas_gpu.scatter(jnp.asarray(case.pages), case.staged, *about)
    return (
        api.Gathered(staged, case.fresh, staged_sums),
        api.Scattered(pages, case.fresh, new_sums),
        api.Verified(case.fresh, pallas_gpu.verify(case.pages, *about)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_kernel(dtype: str, monkeypatch) -> None:
    interpreter = strict.gpu_interpreter()
    monkeypatch.setattr(pallas_gpu, "TILE_BYTES", 128 * jnp.dtype(dtype).itemsize)
    case = make(3, dtype)
    check(case, *_on_gpu(case, interpreter))


@pytest.mark.full
@hypothesis.settings(max_examples=5)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_any_ids_on_tpu(seed: int, dtype: str) -> None:
    case = make(seed, dtype)
    check(case, *strict.tpu(lambda: run(case, "interpret")))


@pytest.mark.full
@hypothesis.settings(max_examples=5)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_any_ids_on_gpu(seed: int, dtype: str) -> None:
    case = make(seed, dtype)
    check(case, *_on_gpu(case, strict.gpu_interpreter()))


def test_shared_pages_are_read_for_each() -> None:
    pages = jax.random.normal(jax.random.key(0), (2, PAGES, 8, 32))
    out = api.gather(pages, jnp.array([1, 1, 3, 1], jnp.int32))
    assert out.fresh.all() and len(set(np.asarray(out.sums).tolist())) == 2
    same(out.staged[:, 0], np.asarray(out.staged[:, 3]))


def test_widths_of_any_rank() -> None:
    rng = np.random.default_rng(0)
    for shape in ((2, 5, 8), (2, 5, 8, 4, 8)):
        pages = jnp.asarray(rng.normal(size=shape), jnp.float32)
        out = strict.tpu(
            lambda pages=pages: api.gather(
                pages, jnp.array([4, 0], jnp.int32), implementation="interpret"
            )
        )
        same(out.staged, np.asarray(pages)[:, [4, 0]])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pages": np.zeros((2, 5))}, "must be"),
        ({"pages": np.zeros((2, 5, 8, 32), np.complex64)}, "4 bytes"),
        ({"ids": np.zeros(6, np.int64)}, r"i32\[k\], got int64\[6\]"),
        ({"ids": [0] * 6}, r"i32\[k\], got int64\[6\]"),
        ({"ids": jnp.zeros(6, jnp.int8)}, r"i32\[k\], got int8\[6\]"),
        ({"generation": None}, "both"),
        ({"expected": np.zeros(2, np.int32)}, "expected"),
        ({"staged": np.zeros((2, 6, 8, 31), np.float32)}, "staged is"),
    ],
)
def test_wrong_input(changes: dict, message: str) -> None:
    case = make(0, "float32")._replace(**changes)
    with pytest.raises(ValueError, match=message):
        api.scatter(case.pages, case.staged, case.ids, case.generation, case.expected)


def test_a_salt_is_an_integer() -> None:
    with pytest.raises(ValueError, match="salt must be an integer"):
        api.verify(jnp.zeros((1, 2, 8, 16)), jnp.zeros(1, jnp.int32), salt=1.5)


def test_what_a_backend_cannot() -> None:
    ids = jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="bool"):
        api.verify(jnp.zeros((1, 2, 8, 16), bool), ids, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="longer pages"):
        api.verify(jnp.zeros((1, 2, 1, 16)), ids, implementation="pallas_gpu")


SHAPES = {  # layers, pages, entries, width
    "tiny": (2, 5, 8, 16),
    "Flash csa entries": (21, 1000, 32, 512),
    "Flash index keys": (21, 1000, 32, 128),
    "Flash hca entries": (20, 1000, 1, 512),
    "Flash csa entries, quantised": (21, 1000, 32, 584),
    "Flash index keys, quantised": (21, 1000, 32, 68),
    "Pro csa entries, long pages": (30, 100, 1024, 512),
}


@pytest.mark.parametrize("name", variants.some(SHAPES, ("tiny", "Flash csa entries")))
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers(name: str, platform: str) -> None:
    implementation = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}[platform]
    for dtype in DTYPES:
        layers, pages, *rest = SHAPES[name]
        shapes = Case(
            jax.ShapeDtypeStruct((layers, pages, *rest), dtype),
            jax.ShapeDtypeStruct((layers, 4, *rest), dtype),
            *(jax.ShapeDtypeStruct((n,), jnp.int32) for n in (4, pages, 4)),
        )
        text = strict.lowered(lambda case: run(case, implementation), platform, shapes)
        assert strict.kernels_in(text, platform) == 3
        staged = layers * 4 * rest[0] * rest[1]
        assert memory.largest(lambda case: run(case, implementation), shapes) <= max(staged, pages)


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_no_ids_at_all(implementation: str) -> None:
    pages, ids = np.ones((2, 3, 4, 128), np.float32), np.zeros(0, np.int32)
    how = dict(implementation=implementation)
    assert api.gather(pages, ids, **how).staged.shape == (2, 0, 4, 128)
    assert api.verify(pages, ids, **how).sums.shape == (0,)
    same = api.scatter(pages, np.ones((2, 0, 4, 128), np.float32), ids, **how).pages
    np.testing.assert_array_equal(same, pages)
    with pytest.raises(ValueError, match="no pages to copy"):
        api.gather(np.ones((2, 0, 4, 128), np.float32), ids, **how)
