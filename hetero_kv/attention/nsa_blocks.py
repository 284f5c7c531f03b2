"""What native sparse attention makes of blocks: compressed keys and values, and which to select.

A block of `span` tokens begins every `stride` tokens, so blocks overlap. An MLP over the block's
rows, with a learned vector per place in it, gives one compressed key and one value per head
(arXiv 2502.11089, equation 7).
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import ring
from hetero_kv.contract import Evidence, Leaf, Point
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamSpec, ParamTree, matrix


@dataclasses.dataclass(frozen=True)
class Blocks:
    """stride | span: of compressed blocks; select: tokens of a block that is selected; top: how
    many of those a query gets, the first and the last two among them."""

    span: int
    stride: int
    select: int
    top: int

    def __post_init__(self):
        if self.stride < 1 or self.span % self.stride or self.select % self.stride:
            raise ValueError(
                f"stride={self.stride} must divide span={self.span} and select={self.select}"
            )
        if self.span > self.select or self.top < 3:
            raise ValueError(
                f"need span <= select and top >= 3 (the first block and two local ones), got {self}"
            )

    def importance(self, shares: jax.Array, count: int) -> jax.Array:
        """Attention shares f32[..., N] of compressed blocks to those of selected: f32[..., count].

        A compressed block counts for a selected one as often as strides of it lie therein
        (equation 9). The sum has one order, whatever N.
        """
        before, step = self.span // self.stride - 1, self.select // self.stride
        room = count * step + before
        shares = shares[..., : count * step]
        pad = [(0, 0)] * (shares.ndim - 1) + [(before, room - before - shares.shape[-1])]
        shares = jnp.pad(shares, pad)
        total = jnp.zeros((*shares.shape[:-1], count), jnp.float32)
        for u in range(before + step):
            weight = min(u + 1, before + 1, before + step - u, step)
            part = jax.lax.slice_in_dim(shares, u, u + (count - 1) * step + 1, step, axis=-1)
            total = total + weight * part
        return total


@dataclasses.dataclass(frozen=True)
class BlockCompressor:
    """Rows of `heads` vectors of `dim` channels; hidden: of the MLP, shared by the heads."""

    blocks: Blocks
    heads: int
    dim: int
    hidden: int
    dtype: str

    def params(self) -> ParamTree:
        """One MLP; `places` [span, dim] is added to the rows of a block."""
        wide = self.blocks.span * self.dim
        return {
            "places": ParamSpec((self.blocks.span, self.dim), "normal", 0.02),
            "up": matrix(wide, self.hidden),
            "down": matrix(self.hidden, self.dim),
        }

    def pooled(self, params: Params, rows: jax.Array) -> jax.Array:
        """Blocks [..., span, heads * dim] to [..., heads, dim]."""
        lead = rows.shape[:-2]
        rows = rows.reshape(*lead, self.blocks.span, self.heads, self.dim)
        rows = jnp.swapaxes(rows + params["places"][:, None], -2, -3)
        flat = rows.reshape(*lead, self.heads, self.blocks.span * self.dim)
        return linear(jax.nn.gelu(linear(flat, params["up"])), params["down"])


def tail_leaves(blocks: Blocks, width: int, dtype: str) -> dict[str, Leaf]:
    """The ring of raw rows that are not yet in all their blocks, and their positions."""
    point = Point(group=blocks.stride, keep=blocks.span - blocks.stride)
    evidence = Evidence(of="tail", kind="positions")
    return {
        "tail": Leaf(
            contract=point, component="tails", rows=blocks.span, width=(width,), dtype=dtype
        ),
        "tail_pos": Leaf(contract=evidence, component="tails", rows=blocks.span, dtype="int32"),
    }


def closing(
    blocks: Blocks, tail: jax.Array, raw: jax.Array, start: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of the blocks that close within a call of columns raw [R, S, w] from i32[R] `start`.

    Returns [R, n, span, w] (n static, at least as many as can close), the index of the first
    i32[R], and how many are complete i32[R]. tail: one layer's ring before the call.
    """
    span, stride, columns = blocks.span, blocks.stride, raw.shape[1]
    held = jnp.concatenate([ring.ordered(tail, start), raw], axis=1)  # from position start - span
    most = -(-columns // stride)
    first = jnp.maximum((start - span) // stride + 1, 0)
    done = jnp.maximum((start + count - span) // stride + 1, 0) - first
    index = first[:, None] + jnp.arange(most, dtype=jnp.int32)
    at = (index * stride - start[:, None] + span)[..., None] + jnp.arange(span, dtype=jnp.int32)
    at = jnp.clip(at, 0, held.shape[1] - 1).reshape(held.shape[0], -1, 1)
    rows = jnp.take_along_axis(held, at, axis=1)
    return rows.reshape(held.shape[0], most, span, -1), first, done
