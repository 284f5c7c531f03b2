"""The compressor: gated pooling of groups of tokens into entries (DeepSeek-V4 report, 2.3).

Per channel, an entry is the softmax(gate)-weighted sum of the group's rows, then RMS-normed and
rotated at the position of the group's first token, `ratio * i`. With overlap (CSA) a row carries
two series: its left half serves the entry after its own, its right half its own entry.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import ring
from hetero_kv.attention.norm import rms_norm
from hetero_kv.attention.rope import Rope, rotate, table
from hetero_kv.attention.when import when
from hetero_kv.contract import Evidence, Leaf, Point
from hetero_kv.params import Params, ParamSpec, ParamTree

UNROLL = 16  # rows up to which pooling is unrolled; a sum over a non-minor axis is slow on CPUs


@dataclasses.dataclass(frozen=True)
class Compressor:
    """ratio: tokens per entry; width: channels of an entry; overlap: pool the last group too."""

    d_model: int
    width: int
    ratio: int
    overlap: bool
    rope: Rope
    eps: float
    dtype: str  # of entries

    def __post_init__(self):
        if self.ratio < 2:
            raise ValueError(f"a compression ratio is an integer >= 2, got {self.ratio}")
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

    def params(self) -> ParamTree:
        """Projections to kv and gate, the gate's position bias, the norm of entries."""
        return {
            "kv": ParamSpec((self.d_model, self.series)),
            "gate": ParamSpec((self.d_model, self.series)),
            "position_bias": ParamSpec((self.ratio, self.series), "zeros", dtype="float32"),
            "norm": ParamSpec((self.width,), "ones", dtype="float32"),
        }

    def leaves(self, prefix: str = "") -> dict[str, Leaf]:
        """The ring of raw rows, f32[keep + ratio, 2 * series] (kv, then gate with its bias)."""
        point = Point(group=self.ratio, keep=self.keep)
        rows = self.ratio + self.keep
        name = f"{prefix}tail"
        evidence = Evidence(of=name, kind="positions")
        return {
            name: Leaf(contract=point, component="tails", rows=rows, width=(2 * self.series,)),
            f"{name}_pos": Leaf(contract=evidence, component="tails", rows=rows, dtype="int32"),
        }

    def raw(self, params: Params, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Raw rows f32[..., 2 * series] of inputs x [..., d] at i32[...] positions."""
        kv = jnp.matmul(x, params["kv"], preferred_element_type=jnp.float32)
        gate = jnp.matmul(x, params["gate"], preferred_element_type=jnp.float32)
        bias = params["position_bias"].astype(jnp.float32)[positions % self.ratio]
        return jnp.concatenate([kv, gate + bias], axis=-1)

    def pool(self, current: jax.Array, previous: jax.Array | None, index: jax.Array) -> jax.Array:
        """Pools groups f32[..., ratio, 2 * series] of entries i32[...] `index`: f32[..., width]."""
        right, left = slice(self.series - self.width, self.series), slice(0, self.width)
        kv = current[..., : self.series][..., right]
        gate = current[..., self.series :][..., right]
        if self.overlap:
            absent = (index == 0)[..., None, None]
            before = jnp.where(absent, 0.0, previous[..., : self.series][..., left])
            shut = jnp.where(absent, -jnp.inf, previous[..., self.series :][..., left])
            kv = jnp.concatenate([before, kv], axis=-2)
            gate = jnp.concatenate([shut, gate], axis=-2)
        weight = jnp.exp(gate - jnp.max(gate, axis=-2, keepdims=True))
        return _sum_rows(weight * kv) / _sum_rows(weight)

    def entry(self, params: Params, pooled: jax.Array, index: jax.Array) -> jax.Array:
        """Pooled rows [..., width] to entries: norm, then rotation at position ratio * index."""
        normed = rms_norm(pooled, params["norm"], self.eps)
        turn = table(self.rope, index * self.ratio, jnp.dtype(self.dtype))
        return rotate(normed, turn).astype(self.dtype)

    def forward(self, params: Params, x: jax.Array) -> jax.Array:
        """All complete entries of x [B, T, d] from position 0: [B, T // ratio, width]."""
        batch, tokens, _ = x.shape
        count = tokens // self.ratio
        positions = jnp.arange(count * self.ratio, dtype=jnp.int32)
        groups = self.raw(params, x[:, : count * self.ratio], positions)
        groups = groups.reshape(batch, count, self.ratio, 2 * self.series)
        previous = jnp.pad(groups, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
        index = jnp.arange(count, dtype=jnp.int32)
        return self.entry(params, self.pool(groups, previous, index[None]), index)

    def close_many(
        self, params: Params, tail: jax.Array, raw: jax.Array, start: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Entries that close within a call.

        Args:
            tail: one layer's ring before the call, f32[R, keep + ratio, 2 * series].
            raw: the call's rows, f32[R, S, 2 * series].
            start, count: i32[R] length before the call and tokens that run.

        Returns:
            entries [R, n, width] (n static, at least as many as can close), the index of the
            first i32[R], and how many of them are complete i32[R].
        """
        ratio, size = self.ratio, raw.shape[1]
        most = (ratio - 1 + size) // ratio
        held = jnp.concatenate([ring.ordered(tail, start), raw], axis=1)
        held = jnp.pad(held, ((0, 0), (0, max(most * ratio - size, 0)), (0, 0)))
        # Row 0 of `held` is position start - keep - ratio; the first group begins `keep` tokens
        # before the open group, so the slice below always starts 1 .. ratio rows in.
        offset = ratio - start % ratio
        cut = jax.vmap(
            lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, self.keep + most * ratio)
        )
        groups = cut(held, offset).reshape(tail.shape[0], -1, ratio, tail.shape[2])
        first = start // ratio
        index = first[:, None] + jnp.arange(most, dtype=jnp.int32)
        current = groups[:, 1:] if self.overlap else groups
        pooled = self.pool(current, groups[:, :-1], index)
        done = (start + count) // ratio - first
        return self.entry(params, pooled, index), first, done

    def close_one(self, params: Params, tail: jax.Array, position: jax.Array) -> jax.Array:
        """The entry that the token at i32[R] `position` closes: [R, width] (else unused bytes).

        tail: the ring with this token's raw row in it. The work is skipped when no row closes.
        """
        closes = (position + 1) % self.ratio == 0
        index = position // self.ratio

        def work() -> jax.Array:
            halves = tail.reshape(tail.shape[0], -1, self.ratio, tail.shape[2])
            current, previous = halves[:, 0], halves[:, -1]
            if self.overlap:
                odd = (index % 2 == 1)[:, None, None]
                current = jnp.where(odd, halves[:, 1], halves[:, 0])
                previous = jnp.where(odd, halves[:, 0], halves[:, 1])
            return self.entry(params, self.pool(current, previous, index), index)

        nothing = jnp.zeros((tail.shape[0], self.width), self.dtype)
        return when(jnp.any(closes), work, nothing)


def _sum_rows(x: jax.Array) -> jax.Array:
    """Sum over axis -2, unrolled where short."""
    if x.shape[-2] > UNROLL:
        return jnp.sum(x, axis=-2)
    total = x[..., 0, :]
    for row in range(1, x.shape[-2]):
        total = total + x[..., row, :]
    return total
