"""Products with weights, and the layout of a weight that decoding on a CPU reads fastest."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COLUMNS = 64  # what XLA's CPU products take of a matrix at a time
BLOCK = 2**16  # numbers of a block at most: what a core's cache keeps from one row to the next
BLOCKED = 2**17  # numbers of a matrix in blocks at most: products of larger ones use all cores
NARROW = 16  # columns up to which a matrix is read faster turned
FEW = 8  # rows up to which these layouts are faster than the matrix

_register = functools.partial(jax.tree_util.register_dataclass, meta_fields=())


@functools.partial(_register, data_fields=("columns",))
@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """A weight [*lead, K, N] as blocks of its columns.

    XLA's product of a few rows with a matrix reorders the matrix first, at every call. In blocks
    there is nothing to reorder: small matrices are read up to 1.3 times as fast at 2 to 8 rows
    (jax 0.10.2, 2 cores, AVX-512). On some machines large ones are too; on others XLA shares a
    large matrix out to cores and its blocks not, so that they are 0.7 times as fast.

    columns: [*lead, N / n, K, n], each block in one piece.
    """

    columns: jax.Array

    @classmethod
    def of(cls, weight: jax.Array, columns: int) -> "Blocks":
        """From a weight whose N is a multiple of `columns`."""
        *lead, k, n = weight.shape
        parts = weight.reshape(*lead, k, n // columns, columns)
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


@functools.partial(_register, data_fields=("rows",))
@dataclasses.dataclass(frozen=True, eq=False)
class Turned:
    """A weight [*lead, K, N] of a few columns, which XLA's products of several rows read faster so.

    rows: [*lead, N, K].
    """

    rows: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        *lead, n, k = self.rows.shape
        return (*lead, k, n)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weight."""
        return self.rows.dtype

    def astype(self, dtype: Any) -> "Turned":
        """The weight in another type."""
        return Turned(self.rows.astype(dtype))

    def whole(self) -> jax.Array:
        """The weight as it was declared."""
        return jnp.swapaxes(self.rows, -1, -2)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """`size` columns from `start` on of a weight whose other columns are multiplied with the same.

    Every part's product is that of the whole: XLA finds them equal and makes one.
    """

    joined: jax.Array | Blocks | Turned
    start: int
    size: int


def width(k: int, *wide: int) -> int:
    """Columns of a block for weights [k, n] of each n in `wide` side by side.

    As many as a block may have, in two blocks where that leaves `COLUMNS`: inputs are copied for
    every block, and what follows is computed block by block.
    """
    most = max(min(sum(wide) // 2, BLOCK // k), COLUMNS)
    step = COLUMNS // 2
    return max(n for n in range(step, most + 1, step) if all(x % n == 0 for x in wide))


def whole_blocks(shape: tuple[int, ...]) -> bool:
    """Whether blocks can be made of a weight's columns."""
    return shape[-1] % COLUMNS == 0


def can_join(weight: Any) -> bool:
    """Whether a weight is better one with others that read the same, in one product."""
    return _matrix(weight) and weight.shape[-2] * weight.shape[-1] <= BLOCKED


def can_block(weight: Any) -> bool:
    """Whether blocks help with a weight."""
    return can_join(weight) and whole_blocks(weight.shape)


def laid(weight: Any) -> Any:
    """The weight [*lead, K, N] as products of a few rows read it fastest, maybe as it is."""
    if can_block(weight):
        return Blocks.of(weight, width(*weight.shape[-2:]))
    if _matrix(weight) and weight.shape[-1] <= NARROW:
        return Turned(jnp.swapaxes(weight, -1, -2))
    return weight


def _matrix(weight: Any) -> bool:
    """Products of other types than float32 reorder nothing however a weight lies."""
    array = isinstance(weight, jax.Array | np.ndarray)
    return array and weight.dtype == jnp.float32 and weight.ndim >= 2


def linear(
    x: jax.Array, weight: jax.Array | Blocks | Part | Turned, dtype: Any = None
) -> jax.Array:
    """x [..., K] times weight [K, N], or x [g, R, K] times [g, K, N]: [..., N].

    dtype: of the sum and the result, default that of the operands.
    """
    if isinstance(weight, Part):
        both = linear(x, weight.joined)
        own = both[..., weight.start : weight.start + weight.size]
        return own.astype(dtype or both.dtype)
    if isinstance(weight, Turned):
        if weight.rows.ndim == 2 and math.prod(x.shape[:-1]) == 1:
            # Turned back, XLA would read it number by number within the product.
            y = jnp.matmul(weight.rows, x.reshape(-1), preferred_element_type=dtype)
            return y.reshape(*x.shape[:-1], -1)
        weight = weight.whole()
    if not isinstance(weight, Blocks):
        return jnp.matmul(x, weight, preferred_element_type=dtype)
    rows, columns = x, weight.columns
    if columns.ndim == 3:
        rows, columns = x.reshape(1, -1, x.shape[-1]), columns[None]
    if rows.shape[1] > FEW:
        return jnp.matmul(x, weight.whole(), preferred_element_type=dtype)
    return _blocks(rows, columns, dtype).reshape(*x.shape[:-1], -1)


def grouped(x: jax.Array, weight: jax.Array | Blocks | Turned) -> jax.Array:
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
