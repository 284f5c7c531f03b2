"""Copies pages between a pool and a staging buffer, and checks them as they pass.

A page is one id in all layers of a leaf: `pages` is [L, P, e, *width], and the staging buffer of k
pages is [L, k, e, *width]. Two checks cost no pass of their own over the bytes: ids and generations
(a refused page is neither read nor written), and a u32 checksum per page over all its layers.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.kernels import dispatch, interpret
from hetero_kv.kernels.dispatch import Backend, Implementation
from hetero_kv.kernels.page_copy import reference


class Gathered(NamedTuple):
    """staged: [L, k, e, *width], zeros where not fresh; fresh: bool[k]; sums: u32[k], of staged."""

    staged: jax.Array
    fresh: jax.Array
    sums: jax.Array


class Scattered(NamedTuple):
    """pages: [L, P, e, *width]; fresh: bool[k], which were written; sums: u32[k], of all staged."""

    pages: jax.Array
    fresh: jax.Array
    sums: jax.Array


class Verified(NamedTuple):
    """fresh: bool[k]; sums: u32[k], those of zeros where not fresh."""

    fresh: jax.Array
    sums: jax.Array


def gather(
    pages: jax.Array,
    ids: jax.Array,
    generation: jax.Array | None = None,
    expected: jax.Array | None = None,
    *,
    salt: int | jax.Array = 0,
    implementation: Implementation = "auto",
) -> Gathered:
    """Copies k pages out of a pool.

    Args:
        pages: [L, P, e, *width], values of 1, 2 or 4 bytes.
        ids: i32[k]; an id outside 0 .. P - 1 is no page.
        generation: i32[P], of the pages now; expected: i32[k], what it must be for each id to mean
            what it did. None: both, and every page is fresh.
        salt: u32, tells the leaves of a page apart in its checksum; layer l adds l to it.
        implementation: see `dispatch.call`.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: the named implementation cannot take these.
    """
    pages, ids = _arrays(pages, ids)
    target, fresh = _targets(pages, ids, generation, expected)
    backends = _backends("gather")
    staged, sums = dispatch.call(
        "page gather", backends, _of(ids, implementation), _flat(pages), target, _salt(salt)
    )
    return Gathered(staged.reshape(pages.shape[0], *ids.shape, *pages.shape[2:]), fresh, sums)


def scatter(
    pages: jax.Array,
    staged: jax.Array,
    ids: jax.Array,
    generation: jax.Array | None = None,
    expected: jax.Array | None = None,
    *,
    salt: int | jax.Array = 0,
    implementation: Implementation = "auto",
) -> Scattered:
    """Copies k staged pages into a pool; those that are not fresh change nothing.

    Fresh ids must differ from each other: which of two copies to one page wins is not said. The
    checksum is known only when the bytes are there: a page with a wrong one is to be given up.
    Arguments and errors are those of `gather`; staged: [L, k, e, *width] of the dtype of pages.
    """
    pages, ids = _arrays(pages, ids)
    target, fresh = _targets(pages, ids, generation, expected)
    staged = jnp.asarray(staged)
    want = (pages.shape[0], *ids.shape, *pages.shape[2:])
    if staged.shape != want or staged.dtype != pages.dtype:
        raise ValueError(
            f"staged is {staged.dtype}{list(staged.shape)}; for these pages and ids it must be "
            f"{pages.dtype}{list(want)}"
        )
    new, sums = dispatch.call(
        "page scatter",
        _backends("scatter"),
        _of(ids, implementation),
        _flat(pages),
        _flat(staged),
        target,
        _salt(salt),
    )
    return Scattered(new.reshape(pages.shape), fresh, sums)


def verify(
    pages: jax.Array,
    ids: jax.Array,
    generation: jax.Array | None = None,
    expected: jax.Array | None = None,
    *,
    salt: int | jax.Array = 0,
    implementation: Implementation = "auto",
) -> Verified:
    """Checksums of k pages of a pool, which are read once. As `gather` without a copy."""
    pages, ids = _arrays(pages, ids)
    target, fresh = _targets(pages, ids, generation, expected)
    sums = dispatch.call(
        "page verify",
        _backends("verify"),
        _of(ids, implementation),
        _flat(pages),
        target,
        _salt(salt),
    )
    return Verified(fresh, sums)


@functools.cache
def _backends(name: str) -> dict[str, Backend]:
    from hetero_kv.kernels.page_copy import pallas_gpu, pallas_tpu

    on_tpu = getattr(pallas_tpu, name)

    def interpreted(*arrays):
        return on_tpu(*arrays, interpret=interpret.tpu())

    return {
        "reference": Backend(getattr(reference, name)),
        "pallas_tpu": Backend(on_tpu, pallas_tpu.check),
        "pallas_gpu": Backend(getattr(pallas_gpu, name), pallas_gpu.check),
        "interpret": Backend(interpreted, pallas_tpu.check),
    }


def _arrays(pages: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as JAX arrays; wider ids are refused, not cut."""
    dtype = ids.dtype if hasattr(ids, "dtype") else np.asarray(ids).dtype
    if np.ndim(ids) != 1 or dtype != np.int32:
        raise ValueError(f"ids must be i32[k], got {dtype}{list(np.shape(ids))}")
    return jnp.asarray(pages), jnp.asarray(ids)


def _targets(
    pages: jax.Array,
    ids: jax.Array,
    generation: jax.Array | None,
    expected: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Ids with everything that is refused replaced by P, and which are not: i32[k], bool[k]."""
    if pages.ndim < 3:
        raise ValueError(f"pages must be [L, P, e, *width], got {pages.shape=}")
    if 0 in pages.shape:
        raise ValueError(f"there are no pages to copy: {pages.shape=} has nothing in it")
    if pages.dtype.itemsize > 4 or jnp.issubdtype(pages.dtype, jnp.complexfloating):
        raise ValueError(f"checksums are of dtypes up to 4 bytes, got {pages.dtype=}")
    if (generation is None) != (expected is None):
        raise ValueError("generation and expected are compared: give both, or neither")
    count = pages.shape[1]
    fresh = (ids >= 0) & (ids < count)
    if generation is not None:
        if generation.shape != (count,) or expected.shape != ids.shape:
            raise ValueError(
                f"generation must be i32[{count}] and expected i32{list(ids.shape)}, got "
                f"{generation.shape=} and {expected.shape=}"
            )
        index = jnp.where(fresh, ids, count)
        now = jnp.asarray(generation).at[index].get(mode="fill", fill_value=0)
        fresh &= now == expected
    return jnp.where(fresh, ids, count), fresh


def _of(ids: jax.Array, implementation: Implementation) -> Implementation:
    """A kernel's grid has at least one page; of none there is nothing to be fast at."""
    return implementation if ids.size else "reference"


def _flat(pages: jax.Array) -> jax.Array:
    """[L, P, e, *width] as [L, P, e, w]; a page without width is one entry of e channels."""
    if pages.ndim == 3:
        return pages[:, :, None]
    return pages.reshape(*pages.shape[:3], math.prod(pages.shape[3:]))


def _salt(salt: int | jax.Array) -> jax.Array:
    """Raises ValueError for what is no integer scalar: a cast would cut it."""
    if np.shape(salt) != () or not jnp.issubdtype(jnp.result_type(salt), jnp.integer):
        raise ValueError(f"salt must be an integer scalar, got {salt!r}")
    return jnp.asarray(salt, jnp.uint32)
