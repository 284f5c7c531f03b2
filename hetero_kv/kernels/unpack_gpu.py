"""Quantised rows made float32 in a GPU's registers: what is fetched is the packed bytes.

The bits are those of `Packing.unpack`. A warpgroup takes 64 rows and 64 channels at a time, in the
layout of a product's operand: codes lie as bytes where their channels are, and a row's scales are
brought to its threads by a sum over lanes of which one counts. The two bytes of a bfloat16 cannot
be joined where they are loaded (no reference may be read as another type than it was written as):
they pass through `scratch`, the low ones and the high ones apart.

Copies need rows whose bytes are a multiple of 128 (the copy engine takes multiples of 16 and writes
to multiples of 128 bytes): pack with `align=128`. Rows of 4-bit codes have their even channels
first and then their odd ones, see `order`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import hopper
from hetero_kv.kernels.hopper import ROWS
from hetero_kv.packing import KINDS, TINY, Packing, as_float, decode

BOX = 128  # bytes of a row that one copy brings; they lie as [row bytes / BOX, rows, BOX]
PIECE = 64  # channels that are unpacked at a time


def check(name: str, packing: Packing) -> None:
    """Raises NotImplementedError for rows that cannot be unpacked."""
    own = Unpack(packing)
    if packing.bytes % BOX:
        raise NotImplementedError(
            f"{name}: {packing.kind} rows of {packing.bytes} bytes; the copy engine needs a "
            f"multiple of {BOX}: pack them with align={BOX} (a model's cache_align)"
        )
    if packing.width % (PIECE * own.codes_of_byte):
        raise NotImplementedError(
            f"{name}: {packing.kind} rows of {packing.width} values; a multiple of "
            f"{PIECE * own.codes_of_byte}"
        )
    if packing.coded % 8 or packing.rope % 8 or (packing.rope and packing.offsets["rope"] % 8):
        raise NotImplementedError(
            f"{name}: {packing.kind} rows of {packing.coded} codes and {packing.rope} values of "
            f"bfloat16 at byte {packing.offsets['rope']}; multiples of 8"
        )
    first, size = packing.offsets["scales"], packing.sections["scales"]
    if first // BOX != (first + size - 1) // BOX or first % 2:
        raise NotImplementedError(
            f"{name}: scales at bytes {first} to {first + size - 1} of {packing.kind} rows; they "
            f"must lie within {BOX} bytes"
        )


def memory(packing: Packing, rows: int, stages: int) -> Any:
    """Shared memory for packed rows, u8[stages, boxes, rows, BOX]."""
    return plgpu.SMEM((stages, packing.bytes // BOX, rows, BOX), jnp.uint8)


def scratch(packing: Packing, rows: int) -> tuple:
    """Shared memory that `Unpack` needs for bfloat16 values; of one warpgroup."""
    if not packing.rope:
        return ()
    return plgpu.SMEM((rows, PIECE, 2), jnp.uint8), plgpu.SMEM((rows, PIECE), jnp.float32)


def boxes(source: Any, target: Any, packing: Packing, barrier: Any) -> None:
    """Starts the copies of packed rows [n, bytes] to [boxes, n, BOX]."""
    for box in range(packing.bytes // BOX):
        plgpu.copy_gmem_to_smem(source.at[:, pl.ds(box * BOX, BOX)], target.at[box], barrier)


@dataclasses.dataclass(frozen=True)
class Unpack:
    """How rows of a packing are read."""

    packing: Packing

    @property
    def codes_of_byte(self) -> int:
        """1, or 2 where codes have 4 bits."""
        return 8 // KINDS[self.packing.kind].code.bits

    @property
    def order(self) -> np.ndarray | None:
        """The channels in the order in which `piece` counts them; None: as they are."""
        if self.codes_of_byte == 1:
            return None
        return np.arange(self.packing.width).reshape(-1, 2).T.reshape(-1)

    def piece(self, raw: Any, first: int, scratch: Any = None) -> jax.Array:
        """f32[64, 64]: channels `first ..` of rows in shared memory, u8[boxes, 64, BOX].

        scratch: needed for bfloat16 values; every thread of the warpgroup must call this.
        """
        own = self.packing
        if first >= own.coded:
            return self._rope(raw, first, scratch)
        values = self._coded(raw, first)
        if first + PIECE > own.coded:
            lane = _lane(PIECE)
            values = jnp.where(lane < own.coded - first, values, self._rope(raw, first, scratch))
        return values

    def _coded(self, raw: Any, first: int) -> jax.Array:
        own, code = self.packing, KINDS[self.packing.kind].code
        half = own.width // 2 if self.codes_of_byte == 2 else own.width
        codes = _bytes(raw, first % half, PIECE)
        if code.bits == 4:
            codes = _right(codes, 4) if first >= half else codes & 15
        lane, many = _lane(PIECE), own.group // self.codes_of_byte
        last = min(first % half + PIECE, own.coded) - 1
        scale = None
        for g in range(first % half // many, last // many + 1):
            one = jax.lax.broadcast_in_dim(self._scale(raw, g), (ROWS, PIECE), [0])
            near = lane < g * many - first % half
            scale = one if scale is None else jnp.where(near, scale, one)
        values = decode(code, codes) * scale
        return jnp.where(jnp.abs(values) < TINY, 0.0, values)

    def _scale(self, raw: Any, group: int) -> jax.Array:
        """f32[64], the scale of each row."""
        own = self.packing
        size = own.sections["scales"]
        many = -(-size // 8) * 8
        begin = own.offsets["scales"]
        first = min(begin, begin // BOX * BOX + BOX - many)
        found, lane = _bytes(raw, first, many), _lane(many)

        def number(at: int, bytes_: int) -> jax.Array:
            parts = jnp.zeros_like(found)
            for i in range(bytes_):
                parts = jnp.where(lane == at + i - first, found << 8 * i, parts)
            return jnp.sum(parts.astype(jnp.float32), axis=1).astype(jnp.int32)

        if KINDS[own.kind].e8m0:
            power = number(begin + group, 1)
            return jnp.where(power == 255, math.nan, as_float(power << 23))
        low, high = (number(begin + 4 * group + at, 2) for at in (0, 2))
        return as_float(low | high << 16)

    def fill(self, target: Any, raw: Any, first: int, scratch: Any) -> None:
        """Puts channels `first ..` into float memory [rows, n], for any multiple of 2 rows.

        As `piece`, but each thread has single values: scales are read row by row.
        """
        own, code = self.packing, KINDS[self.packing.kind].code
        rows, last = target.shape[0], min(first + target.shape[1], self.packing.coded)
        for at in range(first, last, PIECE):
            width = min(PIECE, last - at)
            layout = _flat(rows, width)
            codes = hopper.load(raw.at[at // BOX, :, pl.ds(at % BOX, width)], layout)
            lane = plgpu.broadcasted_iota(jnp.int32, (rows, width), 1, layout=layout)
            line = plgpu.broadcasted_iota(jnp.int32, (rows, width), 0, layout=layout)
            scale = plgpu.layout_cast(jnp.zeros((rows, width), jnp.float32), layout)
            for g in range(at // own.group, (at + width - 1) // own.group + 1):
                there = lane >= g * own.group - at
                put = functools.partial(self._put_scale, raw, g, line, there)
                scale = jax.lax.fori_loop(0, rows, put, scale)
            values = decode(code, codes.astype(jnp.int32)) * scale
            values = jnp.where(jnp.abs(values) < TINY, 0.0, values)
            target[:, pl.ds(at - first, width)] = values.astype(target.dtype)
        for at in range(max(first, own.coded), first + target.shape[1], PIECE):
            width = min(PIECE, first + target.shape[1] - at)
            values = self._joined(raw, at, width, 0, scratch)
            target[:, pl.ds(at - first, width)] = values.astype(target.dtype)

    def _put_scale(
        self,
        raw: Any,
        group: int,
        line: jax.Array,
        there: jax.Array,
        row: jax.Array,
        scale: jax.Array,
    ) -> jax.Array:
        """The scales f32[rows, n] with those of one row and group, `there`."""
        wide = not KINDS[self.packing.kind].e8m0
        at = self.packing.offsets["scales"] + group * (4 if wide else 1)
        found = [
            raw[(at + i) // BOX, row, (at + i) % BOX].astype(jnp.int32)
            for i in range(4 if wide else 1)
        ]
        if wide:
            one = as_float(found[0] | found[1] << 8 | found[2] << 16 | found[3] << 24)
        else:
            one = jnp.where(found[0] == 255, math.nan, as_float(found[0] << 23))
        return jnp.where((line == row) & there, one, scale)

    def _rope(self, raw: Any, first: int, scratch: Any) -> jax.Array:
        """f32[64, 64]: channels `first ..`, of which those are right that are bfloat16."""
        begin = max(first, self.packing.coded)
        width = first + PIECE - begin
        values = self._joined(raw, begin, width, begin - first, scratch)
        scratch[1][:, pl.ds(begin - first, width)] = values
        plgpu.commit_smem()
        return hopper.load(scratch[1], plgpu.Layout.WGMMA)

    def _joined(self, raw: Any, first: int, width: int, lane: int, scratch: Any) -> jax.Array:
        """f32[rows, width] of bfloat16 channels; lane: of the scratch, where they pass through."""
        rows, channels = raw.shape[1], pl.ds(lane, width)
        at = self.packing.offsets["rope"] + 2 * (first - self.packing.coded)
        end, pairs = at + 2 * width, scratch[0]
        while at < end:
            size = min(end, (at // BOX + 1) * BOX) - at
            found = hopper.load(raw.at[at // BOX, :, pl.ds(at % BOX, size)], _flat(rows, size))
            pairs[:, pl.ds(lane, size // 2), :] = found.reshape(rows, size // 2, 2)
            lane, at = lane + size // 2, at + size
        plgpu.commit_smem()
        low, high = (
            hopper.load(pairs.at[:, channels, half], _flat(rows, width)).astype(jnp.int32)
            for half in (0, 1)
        )
        values = as_float(low << 16 | high << 24)
        if self.packing.dtype == "float32":
            return values
        return jnp.where(jnp.abs(values) < TINY, 0.0, values)


def _flat(rows: int, width: int) -> Any:
    """The layout of arrays [rows, width] that can be stored, and loaded, with any strides."""
    return plgpu.Layout.WG_STRIDED((rows, width), vec_size=1)


def _lane(width: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 1, layout=plgpu.Layout.WGMMA)


def _bytes(raw: Any, first: int, width: int) -> jax.Array:
    """i32[64, width]: bytes `first ..` of rows, within one box."""
    source = raw.at[first // BOX, :, pl.ds(first % BOX, width)]
    return hopper.load(source, plgpu.Layout.WGMMA).astype(jnp.int32)


def _right(x: jax.Array, by: int) -> jax.Array:
    return jax.lax.shift_right_logical(x, jnp.full_like(x, by))
