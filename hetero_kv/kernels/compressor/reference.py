"""The compressor's maths in plain jnp: oracle of the kernels, the path on CPUs, and in training.

Per channel, an entry is the softmax(gate)-weighted sum of its group's rows, then RMS-normed and
rotated at the position of the group's first token, `ratio * i` (DeepSeek-V4 report, 2.3). With
overlap (CSA) a row carries two series: its left half serves the entry after its own, its right half
its own entry. A raw row is [kv series, gate series], the gate with its position bias.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import pool as pools
from hetero_kv.attention import ring
from hetero_kv.attention.norm import rms_norm
from hetero_kv.attention.pool import Pool
from hetero_kv.attention.rope import Rope, rotate, table
from hetero_kv.attention.when import when
from hetero_kv.kernels import checks

UNROLL = 16  # rows up to which pooling is unrolled; a sum over a non-minor axis is slow on CPUs


@dataclasses.dataclass(frozen=True)
class Pooling:
    """What is static: ratio, tokens per entry; width, channels of an entry; dtype of entries.

    overlap: pool the left half of the group before, too.
    """

    ratio: int
    width: int
    overlap: bool
    rope: Rope
    eps: float
    dtype: str

    def __post_init__(self):
        checks.count("ratio", self.ratio, 2)
        checks.count("width", self.width)
        if self.rope.dim > self.width:
            raise ValueError(f"rope dim {self.rope.dim} exceeds the entry width {self.width}")

    @property
    def series(self) -> int:
        """Channels of a raw row's kv (and of its gate)."""
        return self.width * (2 if self.overlap else 1)

    @property
    def keep(self) -> int:
        """Tokens of the previous group that the next entry needs."""
        return self.ratio if self.overlap else 0

    @property
    def held(self) -> int:
        """Rows of the ring."""
        return self.keep + self.ratio

    def most(self, size: int) -> int:
        """Entries that `size` tokens can close at most."""
        return (self.ratio - 1 + size) // self.ratio


def pool(
    how: Pooling, current: jax.Array, previous: jax.Array | None, index: jax.Array
) -> jax.Array:
    """Pools groups f32[..., ratio, 2 * series] of entries i32[...] `index`: f32[..., width]."""
    right, left = slice(how.series - how.width, how.series), slice(0, how.width)
    kv = current[..., : how.series][..., right]
    gate = current[..., how.series :][..., right]
    if how.overlap:
        absent = (index == 0)[..., None, None]
        before = jnp.where(absent, 0.0, previous[..., : how.series][..., left])
        shut = jnp.where(absent, -jnp.inf, previous[..., how.series :][..., left])
        kv = jnp.concatenate([before, kv], axis=-2)
        gate = jnp.concatenate([shut, gate], axis=-2)
    weight = jnp.exp(gate - jnp.max(gate, axis=-2, keepdims=True))
    return _sum_rows(weight * kv) / _sum_rows(weight)


def entry(how: Pooling, norm: jax.Array, pooled: jax.Array, index: jax.Array) -> jax.Array:
    """Pooled rows [..., width] to entries: norm, then rotation at position ratio * index."""
    normed = rms_norm(pooled, norm, how.eps)
    turn = table(how.rope, index * how.ratio, jnp.dtype(how.dtype))
    return rotate(normed, turn).astype(how.dtype)


def close_many(
    how: Pooling,
    norm: jax.Array,
    tail: jax.Array,
    raw: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Entries that close within a call.

    Args:
        norm: f32[width], the norm's weight.
        tail: one layer's ring before the call, f32[R, keep + ratio, 2 * series].
        raw: the call's rows, f32[R, S, 2 * series].
        start, count: i32[R] length before the call and tokens that run.

    Returns:
        entries [R, n, width] (n static, at least as many as can close), the index of the
        first i32[R], and how many of them are complete i32[R].
    """
    ratio, size = how.ratio, raw.shape[1]
    most = how.most(size)
    held = jnp.concatenate([ring.ordered(tail, start), raw], axis=1)
    held = jnp.pad(held, ((0, 0), (0, max(most * ratio - size, 0)), (0, 0)))
    # Row 0 of `held` is position start - keep - ratio; the first group begins `keep` tokens
    # before the open group, so the slice below always starts 1 .. ratio rows in.
    offset = ratio - start % ratio
    cut = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, how.keep + most * ratio))
    groups = cut(held, offset).reshape(tail.shape[0], -1, ratio, tail.shape[2])
    first = start // ratio
    index = first[:, None] + jnp.arange(most, dtype=jnp.int32)
    current = groups[:, 1:] if how.overlap else groups
    pooled = pool(how, current, groups[:, :-1], index)
    done = (start + count) // ratio - first
    return entry(how, norm, pooled, index), first, done


def close_one(
    how: Pooling, norm: jax.Array, tail: jax.Array, layer: jax.Array, position: jax.Array
) -> jax.Array:
    """The entry that the token at i32[R] `position` closes: [R, width] (else unused bytes).

    tail: all layers' rings with this token's raw row in them: of one layer alone, taken out in
    front of the loop, XLA would make copies at every step. The work is skipped when no row closes.
    """
    closes = (position + 1) % how.ratio == 0
    index = position // how.ratio

    def work(tail: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
        tail = ring.read(tail, layer)
        halves = tail.reshape(tail.shape[0], -1, how.ratio, tail.shape[2])
        current, previous = halves[:, 0], halves[:, -1]
        if how.overlap:
            odd = (index % 2 == 1)[:, None, None]
            current = jnp.where(odd, halves[:, 1], halves[:, 0])
            previous = jnp.where(odd, halves[:, 0], halves[:, 1])
        return entry(how, norm, pool(how, current, previous, index), index)

    nothing = jnp.zeros((tail.shape[1], how.width), how.dtype)
    return when(jnp.any(closes), work, nothing, tail, layer, index)


def store(
    how: Pooling,
    pool_: Pool,
    layer: jax.Array,
    norm: jax.Array,
    tail: jax.Array,
    raw: jax.Array | None,
    start: jax.Array,
    count: jax.Array,
) -> Pool:
    """The pool with the entries in it that close; see `api.store`."""
    if raw is None:
        new, first = close_one(how, norm, tail, layer, start)[:, None], start // how.ratio
        done = (start + count) // how.ratio - first
    else:
        new, first, done = close_many(how, norm, ring.read(tail, layer), raw, start, count)
    return pools.append(pool_, layer, first, new, done)


def _sum_rows(x: jax.Array) -> jax.Array:
    """Sum over axis -2, unrolled where short."""
    if x.shape[-2] > UNROLL:
        return jnp.sum(x, axis=-2)
    total = x[..., 0, :]
    for row in range(1, x.shape[-2]):
        total = total + x[..., row, :]
    return total
