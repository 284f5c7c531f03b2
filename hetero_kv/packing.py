"""Quantised rows: float rows [..., width] as bytes u8[..., bytes] and back, in published layouts.

Values share scales in groups along a row; the last `rope` values of a row may stay bfloat16. Bytes
of a row, in this order (all numbers little-endian; n = width - rope, groups of g values):

| kind | bytes | g | published rows |
|---|---|---|---|
| fp8_rope | n e4m3, rope bf16, n / g scales e8m0, zeros up to 8 | 64 | 448 + 64: 584 |
| fp8_f32 | n e4m3, n / g scales f32, rope bf16, zeros up to 4 | 128 | 512 + 64: 656; 128: 132 |
| fp4 | n / 2 pairs e2m1 (the first one low), n / g scales e8m0, zeros up to 4 | 32 | 128: 68 |
| int8 | n int8, n / g scales f32, zeros up to 4 | the row | - |

"Zeros up to 8": so many that a row is a multiple of 8 bytes. e4m3 and e2m1: OCP 8-bit floating
point and microscaling (MX) specifications; e8m0 byte b is 2^(b - 127), 255 is NaN (and 0, which
`pack` never makes, is read as 0). Scales of floats are the smallest power of two under which the
group's largest value, rounded to the code's precision, is a code; those of int8 are max / 127
rounded to eight significant bits. So what is read packs to the bytes it was read from,
pack(unpack(pack(x))) == pack(x) (but for int8 read as bfloat16, too short for code times scale).

Only integer arithmetic, exact products and (int8) one rounded product decide the bits, so that they
are those of no compiler's conversions. A group with a value that is not finite, or rounds to 2^127
or more, becomes NaN as a whole; bytes that are all ones are NaN everywhere (`POISON`). Magnitudes
below 2^-126 count as 0.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

POISON = 255  # of a byte that nobody wrote, where poison is asked for: reads as NaN in every kind
LOWEST = -117  # exponent of the smallest scale: times the smallest code still a normal float32
TINY = 2.0**-126  # magnitudes below are read as 0


class Code(NamedTuple):
    """A small float: sign, exponent with `bias`, `fraction` bits; without a bias: an integer.

    top: the code of the largest magnitude.
    """

    bits: int
    fraction: int
    bias: int
    top: int

    @property
    def peak(self) -> int:
        """The exponent of the largest magnitude."""
        return (self.top >> self.fraction) - self.bias

    @property
    def full(self) -> int:
        """The fraction of the largest magnitude."""
        return self.top & ((1 << self.fraction) - 1)


E4M3 = Code(8, 3, 7, 0x7E)  # largest 448; 0x7F is NaN
E2M1 = Code(4, 1, 1, 0x7)  # largest 6
INT8 = Code(8, 0, 0, 127)


class Kind(NamedTuple):
    """code: of values; group: values per scale (0: the row); e8m0: scales of a byte, not float32;
    rope: whether a row may have bfloat16 values; align: bytes that a row is a multiple of."""

    code: Code
    group: int
    e8m0: bool
    rope: bool
    align: int


KINDS = {
    "fp8_rope": Kind(E4M3, 64, True, True, 8),
    "fp8_f32": Kind(E4M3, 128, False, True, 4),
    "fp4": Kind(E2M1, 32, True, False, 4),
    "int8": Kind(INT8, 0, False, False, 4),
}


@dataclasses.dataclass(frozen=True)
class Packing:
    """How rows are stored.

    kind: one of KINDS. width: values of a row, the `rope` last of them bfloat16. group: values per
    scale; 0: the kind's own, or the whole row where that is shorter. dtype: of rows that are read.
    align: bytes that a row is a multiple of; 0: the kind's own. TPUs want 128, see `Unpack`.

    Raises ValueError for sizes that do not fit together.
    """

    kind: str
    width: int
    rope: int = 0
    group: int = 0
    dtype: str = "float32"
    align: int = 0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"no row layout {self.kind!r}; use one of {', '.join(KINDS)}")
        own = KINDS[self.kind]
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f"{self.kind}: rows are read as float32 or bfloat16, not {self.dtype!r}"
            )
        if self.rope and not own.rope:
            raise ValueError(f"{self.kind} keeps no bfloat16 values, got rope={self.rope}")
        if not 0 <= self.rope < self.width:
            raise ValueError(f"{self.kind}: need 0 <= rope < width, got {self.rope}, {self.width}")
        if self.align < 0:
            raise ValueError(f"{self.kind}: rows are a multiple of align={self.align} bytes")
        if not self.group:
            object.__setattr__(self, "group", min(own.group or self.coded, self.coded))
        if self.group < 0 or self.coded % self.group:
            raise ValueError(
                f"{self.kind}: {self.coded} values do not divide into groups of {self.group}; "
                f"a row has a multiple of {self.group} values (or fewer) before its {self.rope} "
                "of bfloat16"
            )
        if self.coded * own.code.bits % 8:
            raise ValueError(f"{self.kind} packs values in pairs, got {self.coded}")

    @property
    def coded(self) -> int:
        """Values that are quantised: the first of a row."""
        return self.width - self.rope

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.coded // self.group

    @property
    def sections(self) -> dict[str, int]:
        """Bytes of "codes", "rope", "scales" and "zeros", in the order of the row."""
        own = KINDS[self.kind]
        codes, scales = self.coded * own.code.bits // 8, self.groups * (1 if own.e8m0 else 4)
        sizes = {"codes": codes}
        sizes |= {"rope": 2 * self.rope} if own.e8m0 else {"scales": scales}
        sizes |= {"scales": scales} if own.e8m0 else {"rope": 2 * self.rope}
        return sizes | {"zeros": -sum(sizes.values()) % (self.align or own.align)}

    @property
    def offsets(self) -> dict[str, int]:
        """The first byte of every section."""
        sizes = self.sections
        starts = itertools.accumulate(sizes.values(), initial=0)
        return dict(zip(sizes, starts, strict=False))

    @property
    def bytes(self) -> int:
        """Bytes of a row."""
        return sum(self.sections.values())

    def sign(self, value: int) -> tuple[int, int]:
        """Byte of a row, and bit in it, with the sign of one of its values."""
        if not 0 <= value < self.width:
            raise ValueError(f"a row has values 0 .. {self.width - 1}, got {value}")
        if value < self.coded:
            last = (value + 1) * KINDS[self.kind].code.bits - 1
            return last // 8, last % 8
        return self.offsets["rope"] + 2 * (value - self.coded) + 1, 7

    def pack(self, rows: jax.Array) -> jax.Array:
        """Float rows [..., width] to u8[..., bytes]."""
        if rows.shape[-1:] != (self.width,):
            raise ValueError(f"{self.kind}: rows of {self.width} values, got {list(rows.shape)}")
        own, rows = KINDS[self.kind], rows.astype(jnp.float32)
        lead = rows.shape[:-1]
        groups = rows[..., : self.coded].reshape(*lead, self.groups, self.group)
        codes, scales = (_encode_int8 if own.code is INT8 else _encode)(own.code, groups)
        codes = codes.reshape(*lead, self.coded)
        if own.code.bits == 4:
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        parts = {
            "codes": codes.astype(jnp.uint8),
            "rope": _bytes_of(_to_bf16(rows[..., self.coded :]), 2),
            "scales": (scales >> 23).astype(jnp.uint8) if own.e8m0 else _bytes_of(scales, 4),
            "zeros": jnp.zeros((*lead, self.sections["zeros"]), jnp.uint8),
        }
        return jnp.concatenate([parts[name] for name in self.sections], axis=-1)

    def unpack(self, packed: jax.Array) -> jax.Array:
        """u8[..., bytes] to rows [..., width] of `dtype`."""
        if packed.shape[-1:] != (self.bytes,) or packed.dtype != jnp.uint8:
            raise ValueError(
                f"{self.kind}: rows of u8[{self.bytes}], got {packed.dtype}{list(packed.shape)}"
            )
        own, parts, at = KINDS[self.kind], {}, 0
        for name, size in self.sections.items():
            parts[name], at = packed[..., at : at + size], at + size
        codes, scales = parts["codes"].astype(jnp.int32), parts["scales"]
        if own.code.bits == 4:
            codes = jnp.stack([codes & 15, codes >> 4], axis=-1)
        codes = codes.reshape(*packed.shape[:-1], self.groups, self.group)
        if own.e8m0:
            bits = scales.astype(jnp.uint32)
            bits = jnp.where(bits == 255, jnp.uint32(_NAN), bits << 23)
        else:
            bits = _number_of(scales, 4)
        values = decode(own.code, codes) * as_float(bits)[..., None]
        values = jnp.where(jnp.abs(values) < TINY, 0.0, values)
        values = values.reshape(*packed.shape[:-1], self.coded)
        if self.rope:
            rest = as_float(_number_of(parts["rope"], 2) << 16)
            values = jnp.concatenate([values, rest], axis=-1)
        if self.dtype == "float32":
            return values
        return _from_bf16(_to_bf16(values))

    def settled(self, rows: jax.Array) -> jax.Array:
        """What is read where `rows` are stored: unpack(pack(rows)). Gradients pass unchanged."""
        return _settled(self, rows)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("rows",), meta_fields=("packing",)
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """Stored rows: an array u8[..., bytes] (or pages of such), and how to read them."""

    rows: Any
    packing: Packing


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _settled(packing: Packing, rows: jax.Array) -> jax.Array:
    return packing.unpack(packing.pack(rows))


@_settled.defjvp
def _through(packing: Packing, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    out = _settled(packing, *primals)
    return out, tangents[0].astype(out.dtype)


_NAN = 0xFFFFFFFF


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def as_float(bits: jax.Array) -> jax.Array:
    """f32 of 32 bits."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _nearest(bits: jax.Array, drop: int) -> jax.Array:
    """Bits of magnitudes without the last `drop` ones, rounded to nearest, ties to even."""
    return (bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop


def _largest(groups: jax.Array) -> jax.Array:
    """Bits u32[..., G] of the largest magnitude of groups f32[..., G, g]; NaN is the largest."""
    return jnp.max(_bits(groups) & 0x7FFFFFFF, axis=-1)  # magnitudes are ordered like their bits


def _encode(code: Code, groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes i32[..., G, g] and bits of scales u32[..., G] of groups f32[..., G, g]."""
    top = _nearest(_largest(groups), 23 - code.fraction)
    sound = top >> code.fraction < 254
    above = (top & ((1 << code.fraction) - 1)) > code.full
    power = (top >> code.fraction).astype(jnp.int32) - code.peak + above  # biased by 127
    power = jnp.maximum(power, 127 + LOWEST).astype(jnp.uint32)
    value = _bits(groups * as_float(jnp.where(sound, 254 - power, 0) << 23)[..., None])
    size, sign = value & 0x7FFFFFFF, (value >> 31).astype(jnp.int32)
    small = jnp.round(as_float(size) * 2.0 ** (code.bias - 1 + code.fraction)).astype(jnp.int32)
    large = _nearest(size, 23 - code.fraction).astype(jnp.int32)
    large = large - ((127 - code.bias) << code.fraction)
    codes = jnp.where(size >> 23 < 128 - code.bias, small, jnp.minimum(large, code.top))
    codes = jnp.where(_bits(groups) << 1 >> 24 == 0, 0, codes)
    codes = codes | jnp.where(codes > 0, sign << (code.bits - 1), 0)
    codes = jnp.where(sound[..., None], codes, (1 << code.bits) - 1)
    return codes, jnp.where(sound, power << 23, jnp.uint32(_NAN))


def _encode_int8(_: Code, groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `_encode`, with symmetric integers."""
    top = _largest(groups)
    scale = _bits(as_float(jnp.minimum(top, 0x7F800000)) * (1 / 127))
    scale = _nearest(scale, 16) << 16
    sound = as_float(scale) * 127 < 2.0**127
    scale = jnp.where(scale >> 23 < 127 + LOWEST, 0, scale)
    over = jnp.where(scale > 0, 1 / as_float(jnp.maximum(scale, 1 << 23)), 0.0)
    codes = jnp.round(groups * over[..., None])
    codes = jnp.where(sound[..., None], codes, -1.0).astype(jnp.int32) & 255
    return codes, jnp.where(sound, scale, jnp.uint32(_NAN))


def decode(code: Code, codes: jax.Array) -> jax.Array:
    """Values f32 of codes i32. In operations that TPU kernels have as well."""
    if code is INT8:
        return jnp.where(codes > 127, codes - 256, codes).astype(jnp.float32)
    size = codes & ((1 << (code.bits - 1)) - 1)
    part = (size & ((1 << code.fraction) - 1)).astype(jnp.float32)
    small = part * 2.0 ** (1 - code.bias - code.fraction)
    large = as_float((size + ((127 - code.bias) << code.fraction)) << (23 - code.fraction))
    value = jnp.where(size < 1 << code.fraction, small, large)
    value = jnp.where(size > code.top, math.nan, value)
    return jnp.where(codes >= 1 << (code.bits - 1), -value, value)


def _to_bf16(values: jax.Array) -> jax.Array:
    """Bits u32 of bfloat16: nearest, ties to even; NaN is all ones, subnormals are 0."""
    bits = _bits(values)
    size = bits & 0x7FFFFFFF
    out = _nearest(size, 16) | bits >> 31 << 15
    out = jnp.where(size >> 23 == 0, 0, out)
    return jnp.where(size > 0x7F800000, 0xFFFF, out)


def _from_bf16(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def _bytes_of(numbers: jax.Array, size: int) -> jax.Array:
    """u32[..., n] to little-endian u8[..., n * size]."""
    parts = [(numbers >> 8 * i & 255).astype(jnp.uint8) for i in range(size)]
    return jnp.stack(parts, axis=-1).reshape(*numbers.shape[:-1], -1)


def _number_of(data: jax.Array, size: int) -> jax.Array:
    """The numbers u32[..., n] of little-endian u8[..., n * size]."""
    parts = data.astype(jnp.uint32).reshape(*data.shape[:-1], -1, size)
    total = parts[..., 0]
    for i in range(1, size):
        total = total | parts[..., i] << 8 * i
    return total
