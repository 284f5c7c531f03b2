"""The small number formats of checkpoints: e4m3 and e2m1 elements, e8m0 scales.

e4m3: one sign, four exponent and three mantissa bits, bias 7, no infinities, NaN is S.1111.111
(OCP 8-bit floating point, revision 1.0, "E4M3"). e2m1: 1-2-1 bits, bias 1, neither infinities nor
NaN; e8m0: a power of two, `2^(code - 127)`, NaN is 255 (OCP microscaling formats, version 1.0,
sections 5.3.3 and 5.4.1). Codes are bytes; two e2m1 codes share one, the first in its low half.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from hetero_kv import packing

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E8M0_BIAS, E8M0_NAN = 127, 255
_BYTES = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


# -- on the host -----------------------------------------------------------------------------------


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    """u8[...] to the values f32[...]."""
    return _E4M3[codes]


def from_e2m1(codes: np.ndarray) -> np.ndarray:
    """u8[..., n / 2] to the values f32[..., n]."""
    pairs = np.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], axis=-1)
    return pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def times_e8m0(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """f32 values times the scales of u8 codes, in one rounding; a scale that is NaN gives NaN."""
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.ldexp(values, codes.astype(np.int32) - E8M0_BIAS)
    return np.where(codes == E8M0_NAN, np.float32(np.nan), scaled)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """f32 to the nearest code u8, ties to even; beyond ±448 the largest one. NaN stays NaN."""
    clipped = np.clip(values, -E4M3_MAX, E4M3_MAX)
    return clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def to_e2m1(values: np.ndarray) -> np.ndarray:
    """f32[..., n], n even, to the nearest codes u8[..., n / 2], ties to even.

    Beyond ±6 it is the largest one. Raises ValueError for NaN, which the format lacks.
    """
    if np.isnan(values).any():
        raise ValueError("NaN has no e2m1 code")
    clipped = np.clip(values, -E2M1_MAX, E2M1_MAX)
    codes = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return codes[..., ::2] | codes[..., 1::2] << 4


# -- in compiled code ------------------------------------------------------------------------------


def decode_e4m3(codes: jax.Array) -> jax.Array:
    """As `from_e4m3`."""
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """As `from_e2m1`."""
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-1).astype(jnp.int32)
    return packing.decode(packing.E2M1, pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1]))


def scale_e8m0(values: jax.Array, codes: jax.Array) -> jax.Array:
    """As `times_e8m0`, except that backends which flush subnormal numbers flush such results.

    Two factors, neither subnormal: one factor of 2^-127 would be flushed before it is used.
    """
    exponent = codes.astype(jnp.int32) - E8M0_BIAS
    half = exponent >> 1
    rest = jnp.where(codes == E8M0_NAN, jnp.float32(jnp.nan), _power(exponent - half))
    return values * _power(half) * rest


def _power(exponent: jax.Array) -> jax.Array:
    """2^exponent as f32, -126 <= exponent <= 127."""
    return jax.lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)
