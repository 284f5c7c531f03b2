"""Quantised rows made float32 in a TPU's on-chip memory: what is fetched is the packed bytes.

The bits are those of `Packing.unpack`. Bytes that lie as a vector register has them are decoded in
place; those that do not (pairs of bytes of a bfloat16, two codes in a byte, scales) are brought to
their lanes by a product with a matrix of 0, 1 and 256: sums of bytes below 2**16, exact in any
precision that the matrix unit has.

XLA keeps arrays whose last axis is no multiple of 128 bytes in another order, to save padding. A
kernel would then be given a copy of the whole pool: rows want `align=128`, or a pool that was put
there in row-major order (`jax.experimental.layout`). "auto" takes the reference otherwise.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.attention.pool import Pool
from hetero_kv.kernels import paging
from hetero_kv.packing import KINDS, TINY, Packing, as_float, decode

LANES = 128


def row_major(name: str, pool: Pool) -> None:
    """Raises NotImplementedError for a quantised pool that XLA would copy for a kernel."""
    packing = paging.packing(pool)
    if packing and packing.bytes % LANES:
        raise NotImplementedError(
            f"{name}: rows of {packing.bytes} bytes are not in row-major order on a TPU unless the "
            f"pool was put there so; pack them with align={LANES} (a model's cache_align)"
        )


@dataclasses.dataclass(frozen=True)
class Unpack:
    """How rows of a packing are read."""

    packing: Packing

    @property
    def begin(self) -> int:
        """The first byte that the matrix looks at, at the start of a register."""
        own = self.packing
        whole = own.coded // LANES * LANES if KINDS[own.kind].code.bits == 8 else 0
        return min(whole, own.offsets["scales"] // LANES * LANES)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """First channel and width of the pieces that a row is made in."""
        width = self.packing.width
        return [(at, min(LANES, width - at)) for at in range(0, width, LANES)]

    def direct(self, first: int, width: int) -> bool:
        """Whether the codes of a piece lie where its channels are."""
        own = self.packing
        return KINDS[own.kind].code.bits == 8 and first + width <= own.coded

    def matrix(self) -> jax.Array:
        """bf16[bytes - begin, n]: low halves of scales, their high halves where they are floats,
        then the pieces that do not lie right, each in LANES columns."""
        own = self.packing
        scales, rope = own.offsets["scales"], own.offsets["rope"]
        wide = not KINDS[own.kind].e8m0
        found = np.zeros((own.bytes - self.begin, 0), np.float32)

        def column() -> np.ndarray:
            nonlocal found
            new = np.zeros((found.shape[0], LANES), np.float32)
            found = np.concatenate([found, new], axis=1)
            return found[:, -LANES:]

        for half in range(2 if wide else 1):
            part = column()
            for g in range(own.groups):
                at = scales + (4 * g + 2 * half if wide else g) - self.begin
                part[at, g] = 1
                if wide:
                    part[at + 1, g] = 256
        for first, width in self.blocks:
            if self.direct(first, width):
                continue
            part = column()
            for lane, channel in enumerate(range(first, first + width)):
                if channel < own.coded:
                    at = channel * KINDS[own.kind].code.bits // 8
                    part[at - self.begin, lane] = 1
                else:
                    at = rope + 2 * (channel - own.coded) - self.begin
                    part[at, lane], part[at + 1, lane] = 1, 256
        return jnp.asarray(found, jnp.bfloat16)

    def rows(self, data: jax.Array, matrix: jax.Array) -> jax.Array:
        """f32[T, width] of bytes [T, bytes] (i32, or f32 with such values); matrix: `matrix()`."""
        own = self.packing
        tail = data[:, self.begin :].astype(jnp.float32).astype(jnp.bfloat16)
        moved = jax.lax.dot_general(
            tail, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ).astype(jnp.int32)
        parts = [moved[:, at : at + LANES] for at in range(0, moved.shape[1], LANES)]
        scales, found = self._scales(parts), []
        for first, width in self.blocks:
            if self.direct(first, width):
                found.append(self._coded(data[:, first : first + width], scales, first))
                continue
            numbers = parts.pop(0)[:, :width]
            if first >= own.coded:
                found.append(as_float(numbers << 16))
                continue
            values = self._coded(numbers, scales, first)
            if first + width > own.coded:
                lane = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
                values = jnp.where(lane < own.coded - first, values, as_float(numbers << 16))
            found.append(values)
        rows = found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)
        if own.dtype == "float32":
            return rows
        rows = jnp.where(jnp.abs(rows) < TINY, 0.0, rows)
        return rows.astype(jnp.bfloat16).astype(jnp.float32)

    def _scales(self, parts: list[jax.Array]) -> jax.Array:
        """f32[T, LANES]: the scale of group g in lane g. Takes its parts off the list."""
        low = parts.pop(0)
        if KINDS[self.packing.kind].e8m0:
            return jnp.where(low == 255, math.nan, as_float(low << 23))
        return as_float(low | parts.pop(0) << 16)

    def _coded(self, codes: jax.Array, scales: jax.Array, first: int) -> jax.Array:
        """Values of codes [T, n], those of channels `first ..`."""
        own, code = self.packing, KINDS[self.packing.kind].code
        codes = codes.astype(jnp.int32)
        lane = jax.lax.broadcasted_iota(jnp.int32, codes.shape, 1)
        if code.bits == 4:
            codes = jnp.where(lane & 1 == 1, jax.lax.shift_right_logical(codes, 4), codes) & 15
        last = min(first + codes.shape[1], own.coded) - 1
        scale = None
        for g in range(first // own.group, last // own.group + 1):
            one = jnp.broadcast_to(scales[:, g : g + 1], codes.shape)
            scale = one if scale is None else jnp.where(lane < g * own.group - first, scale, one)
        values = decode(code, codes) * scale
        return jnp.where(jnp.abs(values) < TINY, 0.0, values)
