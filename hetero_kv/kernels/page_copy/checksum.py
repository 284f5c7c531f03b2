"""A u32 checksum of device pages: cheap, and sensitive to the order of bytes.

Every word is mixed with its place by a bijection (the finaliser of MurmurHash3) and the results are
added up: a single changed word always changes the sum, two exchanged ones almost always. It finds
accidents, not forgeries.
"""

import math

import jax
import jax.numpy as jnp

GOLDEN = 0x9E3779B1  # odd, so that places are all different
FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35


def words(rows: jax.Array) -> jax.Array:
    """[k, ...] of any dtype up to 4 bytes as u32[k, m], one word per element."""
    size = rows.dtype.itemsize
    if size > 4 or jnp.issubdtype(rows.dtype, jnp.complexfloating):
        raise ValueError(f"checksums are of dtypes up to 4 bytes, got {rows.dtype}")
    if rows.dtype == jnp.bool_:
        rows = rows.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(rows, jnp.dtype(f"uint{8 * size}"))
    return bits.astype(jnp.uint32).reshape(rows.shape[0], math.prod(rows.shape[1:]))


def salted(salt: int | jax.Array) -> jax.Array:
    """u32: what a salt adds to every word."""
    return _mix(jnp.asarray(salt, jnp.uint32) + jnp.uint32(1))


def add(total: jax.Array, rows: jax.Array, salt: int | jax.Array) -> jax.Array:
    """Adds rows [k, ...] to the checksums u32[k] of k pages; `salt` tells the parts apart."""
    value = words(rows)
    place = jnp.arange(value.shape[1], dtype=jnp.uint32) * jnp.uint32(GOLDEN)
    value = _mix(value + place + salted(salt))
    return total + jnp.sum(value, axis=1, dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(FIRST)
    x = (x ^ (x >> 13)) * jnp.uint32(SECOND)
    return x ^ (x >> 16)
