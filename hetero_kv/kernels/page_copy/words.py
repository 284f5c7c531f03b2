"""The mixing of page checksums in the form that kernels compute: on i32, shape-agnostic.

The same function as `checksum.add`: sums wrap around, so i32 and u32 have the same bits.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.kernels.page_copy import checksum


def _wrapped(value: int) -> np.int32:
    return np.uint32(value).astype(np.int32)


GOLDEN = _wrapped(checksum.GOLDEN)
FIRST, SECOND = _wrapped(checksum.FIRST), _wrapped(checksum.SECOND)


def of(rows: jax.Array) -> jax.Array:
    """Values of 1, 2 or 4 bytes as i32 words, one per value."""
    size = 8 * rows.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(rows, jnp.dtype(f"int{size}"))
    if size == 32:
        return bits
    return bits.astype(jnp.int32) & np.int32((1 << size) - 1)


def mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 on i32."""
    x = (x ^ _right(x, 16)) * FIRST
    x = (x ^ _right(x, 13)) * SECOND
    return x ^ _right(x, 16)


def _right(x: jax.Array, by: int) -> jax.Array:
    return jax.lax.shift_right_logical(x, jnp.full_like(x, by))


def summands(rows: jax.Array, place: jax.Array, salt: jax.Array) -> jax.Array:
    """i32 of the shape of `rows`: what they add to a checksum.

    place: i32 like rows, the place of each value in its page; salt: i32[], of `checksum.salted`.
    """
    return mix(of(rows) + place * GOLDEN + salt)


def salts(salt: jax.Array, layers: int) -> jax.Array:
    """i32[L]: what each layer's salt adds to every word."""
    mixed = checksum.salted(salt + jnp.arange(layers, dtype=jnp.uint32))
    return jax.lax.bitcast_convert_type(mixed, jnp.int32)


def total(sums: jax.Array) -> jax.Array:
    """i32[k, n, m] partial sums of k pages to u32[k]."""
    bits = jax.lax.bitcast_convert_type(sums, jnp.uint32)
    return jnp.sum(bits, axis=(1, 2), dtype=jnp.uint32)
