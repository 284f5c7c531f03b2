"""Products with weights, and the layout of a weight that decoding on a CPU reads fastest."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COLUMNS = 64  # of a block: what XLA's CPU products take of a matrix at a time
FEW = 8  # rows up to which blocks are faster than the matrix


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """A weight [*lead, K, N] as blocks of its columns.

    XLA's product of a few rows with a matrix reorders the matrix first, at every call, and does not
    share small ones out to cores. With blocks of `COLUMNS` there is nothing to reorder, and they
    are shared out: 1.2 to 2.8 times as fast at 1 to 8 rows (jax 0.10.2, 2 cores, AVX-512).

    columns: [*lead, N / n, K, n], each block in one piece.
    """

    columns: jax.Array

    @classmethod
    def of(cls, weight: jax.Array) -> "Blocks":
        """From a weight whose N is a multiple of `COLUMNS`."""
        *lead, k, n = weight.shape
        parts = weight.reshape(*lead, k, n // COLUMNS, COLUMNS)
        return cls(jnp.moveaxis(parts, -3, -2))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        *lead, blocks, k, n = self.columns.shape
        return (*lead, k, blocks * n)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weight."""
        return self.columns.dtype

    def astype(self, dtype: Any) -> "Blocks":
        """The weight in another type."""
        return Blocks(self.columns.astype(dtype))

    def whole(self) -> jax.Array:
        """The weight in one piece, a copy."""
        return jnp.moveaxis(self.columns, -3, -2).reshape(self.shape)

    def tree_flatten_with_keys(self) -> tuple[list, None]:
        """The array."""
        return [(jax.tree_util.GetAttrKey("columns"), self.columns)], None

    @classmethod
    def tree_unflatten(cls, static: None, arrays: Sequence[Any]) -> "Blocks":
        """The inverse."""
        return cls(*arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """`size` blocks from `start` on of a weight whose other blocks are multiplied with the same.

    Every part's product is that of the whole: XLA finds them equal and makes one.
    """

    joined: Blocks
    start: int
    size: int


def can_block(weight: Any) -> bool:
    """Whether blocks help with a weight.

    Products of other types reorder nothing, or are not shared out, however the weight lies.
    """
    if not isinstance(weight, jax.Array | np.ndarray) or weight.dtype != jnp.float32:
        return False
    return weight.ndim >= 2 and weight.shape[-1] % COLUMNS == 0


def linear(x: jax.Array, weight: jax.Array | Blocks | Part, dtype: Any = None) -> jax.Array:
    """x [..., K] times weight [K, N], or x [g, R, K] times [g, K, N]: [..., N].

    dtype: of the sum and the result, default that of the operands.
    """
    if isinstance(weight, Part):
        first, n = weight.start, weight.joined.columns.shape[-1]
        both = linear(x, weight.joined)
        return both[..., first * n : (first + weight.size) * n].astype(dtype or both.dtype)
    if not isinstance(weight, Blocks):
        return jnp.matmul(x, weight, preferred_element_type=dtype)
    rows, columns = x, weight.columns
    if columns.ndim == 3:
        rows, columns = x.reshape(1, -1, x.shape[-1]), columns[None]
    if rows.shape[1] > FEW:
        return jnp.matmul(x, weight.whole(), preferred_element_type=dtype)
    return _blocks(rows, columns, dtype).reshape(*x.shape[:-1], -1)


def grouped(x: jax.Array, weight: jax.Array | Blocks) -> jax.Array:
    """x [..., g, K], each group times its own weight of [g, K, N]: [..., g, N]."""
    rows = jnp.moveaxis(x.reshape(-1, *x.shape[-2:]), -2, 0)
    return jnp.moveaxis(linear(rows, weight), 0, -2).reshape(*x.shape[:-1], -1)


def _blocks(x: jax.Array, columns: jax.Array, dtype: Any) -> jax.Array:
    """x [g, R, K] times [g, G, K, n]: [g, R, G n]."""
    (g, rows, k), (_, blocks, _, n) = x.shape, columns.shape
    if rows == 1:  # one row alone takes another path, which reads a matrix at half the speed
        x = jnp.concatenate([x, x], axis=1)
    each = jnp.broadcast_to(x[:, None], (g, blocks, *x.shape[1:]))
    y = jnp.matmul(
        each.reshape(g * blocks, -1, k),
        columns.reshape(g * blocks, k, n),
        preferred_element_type=dtype,
    )
    y = y.reshape(g, blocks, -1, n)[:, :, :rows]
    return jnp.moveaxis(y, 1, 2).reshape(g, rows, blocks * n)
