"""Stores the entries that close within a call in their pool: pooled, normed and rotated.

A group whose last token is in the call becomes an entry. Its raw rows are in part in the ring,
from before the call, and in part the call's own; rows of a batch close different numbers of
groups, most of them none. Nothing but the entries is written.
"""

import functools

import jax
import jax.numpy as jnp

from hetero_kv.attention.pool import Pool
from hetero_kv.kernels import checks, dispatch, interpret
from hetero_kv.kernels.compressor import plan, reference
from hetero_kv.kernels.compressor.reference import Pooling
from hetero_kv.kernels.dispatch import Backend, Implementation
from hetero_kv.packing import Packed


def store(
    how: Pooling,
    pool: Pool,
    layer: int | jax.Array,
    norm: jax.Array,
    tail: jax.Array,
    raw: jax.Array | None,
    start: jax.Array,
    count: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> Pool:
    """The pool with the entries `start // ratio .. (start + count) // ratio - 1` of each row.

    Entries beyond a row's pool, or of pages that it may not write, are dropped.

    Args:
        how: what is static.
        pool: [L, R, N, width] or `Paged`, of how.dtype.
        layer: i32[], of the pool and of the tail.
        norm: f32[width].
        tail: rings of raw rows, f32[L, R, keep + ratio, 2 * series]. Before the call; with
            raw = None after the row of its only token was written.
        raw: the call's rows, f32[R, S, 2 * series]; None: the call is one token a row, whose rows
            are in the tail.
        start: i32[R], tokens before the call.
        count: i32[R], tokens that run, at most S (1 without raw); 0 stores nothing.
        implementation: see `dispatch.call`.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: the named implementation cannot take these.
    """
    _check(how, pool, layer, norm, tail, raw, start, count)
    arrays = (pool, jnp.asarray(layer, jnp.int32), norm, tail, raw, start, count)
    return dispatch.call("compressor store", _backends(how), implementation, *arrays)


@functools.cache
def _backends(how: Pooling) -> dict[str, Backend]:
    from hetero_kv.kernels.compressor import pallas_gpu, pallas_tpu

    def bound(function, **options):
        return functools.partial(function, how, **options)

    def interpreted(*arrays):
        return pallas_tpu.store(how, *arrays, interpret=interpret.tpu())

    on_tpu = bound(pallas_tpu.check)
    return {
        "reference": Backend(bound(reference.store), packed=True),
        "pallas_tpu": Backend(bound(pallas_tpu.store), on_tpu),
        "pallas_gpu": Backend(bound(pallas_gpu.store), bound(pallas_gpu.check)),
        "interpret": Backend(interpreted, on_tpu),
    }


def _check(how, pool, layer, norm, tail, raw, start, count) -> None:
    pages = checks.as_read(pool.rows, pool.packing) if isinstance(pool, Packed) else pool
    pages = plan.pages(pages)
    rows = tail.shape[1]
    checks.layer(layer)
    if pages.ndim != 4 or pages.shape[-1] != how.width or pages.dtype != jnp.dtype(how.dtype):
        raise ValueError(
            f"the pool must be {how.dtype}[L, P, e, {how.width}], got {pages.dtype}"
            f"{list(pages.shape)}"
        )
    want = (pages.shape[0], rows, how.held, 2 * how.series)
    if tail.shape != want or tail.dtype != jnp.float32:
        raise ValueError(
            f"tail must be f32{list(want)} (layers, rows, keep + ratio, 2 * series), got "
            f"{tail.dtype}{list(tail.shape)}"
        )
    if raw is not None and (
        raw.ndim != 3 or raw.shape[0] != rows or raw.shape[2] != 2 * how.series
    ):
        raise ValueError(f"raw must be f32[{rows}, S, {2 * how.series}], got {raw.shape=}")
    if raw is not None and raw.dtype != jnp.float32:
        raise ValueError(f"raw rows are kept in float32, got {raw.dtype=}")
    if norm.shape != (how.width,):
        raise ValueError(f"norm must be f32[{how.width}], got {norm.shape=}")
    if start.shape != (rows,) or count.shape != (rows,):
        raise ValueError(f"need i32[{rows}], got {start.shape=} and {count.shape=}")
