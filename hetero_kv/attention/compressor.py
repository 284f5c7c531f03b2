"""The compressor: gated pooling of groups of tokens into entries (DeepSeek-V4 report, 2.3).

Per channel, an entry is the softmax(gate)-weighted sum of the group's rows, then RMS-normed and
rotated at the position of the group's first token, `ratio * i`. With overlap (CSA) a row carries
two series: its left half serves the entry after its own, its right half its own entry.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention.rope import Rope
from hetero_kv.contract import Evidence, Leaf, Point
from hetero_kv.kernels.compressor.reference import Pooling, entry, pool
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamSpec, ParamTree, matrix


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
        _ = self.pooling  # raises ValueError for sizes that make no sense

    @property
    def pooling(self) -> Pooling:
        """What of it concerns how raw rows become entries."""
        return Pooling(self.ratio, self.width, self.overlap, self.rope, self.eps, self.dtype)

    @property
    def series(self) -> int:
        """Channels of a raw row's kv (and of its gate)."""
        return self.pooling.series

    @property
    def keep(self) -> int:
        """Tokens of the previous group that the next entry needs."""
        return self.pooling.keep

    def params(self) -> ParamTree:
        """Projections to kv and gate, the gate's position bias, the norm of entries."""
        return {
            "kv": matrix(self.d_model, self.series, reads="x"),
            "gate": matrix(self.d_model, self.series, reads="x"),
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
        kv = linear(x, params["kv"], jnp.float32)
        gate = linear(x, params["gate"], jnp.float32)
        bias = params["position_bias"].astype(jnp.float32)[positions % self.ratio]
        return jnp.concatenate([kv, gate + bias], axis=-1)

    def forward(self, params: Params, x: jax.Array) -> jax.Array:
        """All complete entries of x [B, T, d] from position 0: [B, T // ratio, width]."""
        batch, tokens, _ = x.shape
        count = tokens // self.ratio
        positions = jnp.arange(count * self.ratio, dtype=jnp.int32)
        groups = self.raw(params, x[:, : count * self.ratio], positions)
        groups = groups.reshape(batch, count, self.ratio, 2 * self.series)
        previous = jnp.pad(groups, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
        index = jnp.arange(count, dtype=jnp.int32)
        pooled = pool(self.pooling, groups, previous, index[None])
        return entry(self.pooling, params["norm"], pooled, index)
