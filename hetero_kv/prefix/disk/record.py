"""The stored form: bytes of a segment's header and of a record's header. No input or output.

    segment = header (512 bytes), records
    record  = state word (8 bytes), header, checksum of the header, payload, zeros up to 512 bytes

A header's checksum covers the segment's salt, its number and the record's offset: a record that
was copied to another place is no record there. Only the state word is ever written again, to kill
the record; it is not under the checksum. Integers are little-endian.
"""

import dataclasses
import functools
import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from hetero_kv.prefix.encoding import encode
from hetero_kv.prefix.payload import label

VERSION = 1
ALIGN = 512  # bytes; records start on it
SEGMENT_HEADER = 512  # bytes
HEADER_LIMIT = 1 << 20  # bytes; a header that claims more is damaged
LIVE, DEAD = b"HKV+LIVE", b"HKV-dead"
STATE = len(LIVE)

_SEGMENT_MAGIC = b"HKV-SEG\n"
_SEGMENT = struct.Struct("<8sIQ16s32s")  # magic, version, number, salt, identity
_FIXED = struct.Struct("<HIHHHIQQQQQ32s")
_COMPONENT = struct.Struct("<HQQ")  # bytes of the name, bytes of the component, checksum
_SUM = struct.Struct("<Q")
PEEK = STATE + _FIXED.size  # bytes from which the size of a header can be told


@dataclasses.dataclass(frozen=True, slots=True)
class Component:
    """A part of a payload and its xxh3-64, which covers the group's label and the name too."""

    name: str
    nbytes: int
    checksum: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What a record says about itself.

    key, depth: of the prefix whose group it is: the key of its last block, and how many blocks.
    generation: a number that no other object of the directory has; kept when records move.
    meta: bytes of the caller's.
    """

    kind: str
    key: bytes
    depth: int
    generation: int
    components: tuple[Component, ...]
    meta: bytes = b""

    @property
    def label(self) -> bytes:
        """What its payload must be."""
        return label(self.kind, self.key, self.depth)

    @functools.cached_property
    def payload_bytes(self) -> int:
        """Bytes of the payload."""
        return sum(x.nbytes for x in self.components)

    @functools.cached_property
    def header_bytes(self) -> int:
        """Bytes before the payload."""
        names = sum(_COMPONENT.size + len(x.name.encode()) for x in self.components)
        fixed = PEEK + len(self.kind.encode()) + len(self.key) + len(self.meta)
        return fixed + names + _SUM.size

    @functools.cached_property
    def record_bytes(self) -> int:
        """Bytes of the whole record, padding included."""
        return aligned(self.header_bytes + self.payload_bytes)

    def damaged(self, payload: np.ndarray, label: bytes | None = None) -> str:
        """The first component of a payload (u8[payload_bytes]) with a wrong checksum, or "".

        label: that of the group that it should be, if not what this header says.
        """
        mine, start = self.label if label is None else label, 0
        for component in self.components:
            state = xxhash.xxh3_64(mine + _encoded(component.name))
            state.update(payload[start : start + component.nbytes])
            start += component.nbytes
            if state.intdigest() != component.checksum:
                return component.name
        return "" if start == payload.nbytes else "size"


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says about itself; `identity`: digest of what its bytes mean (32 bytes)."""

    number: int
    salt: bytes
    identity: bytes

    def pack(self) -> bytes:
        """As stored, padded."""
        body = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, self.number, self.salt, self.identity)
        return (body + _SUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(SEGMENT_HEADER, b"\0")


@functools.lru_cache(maxsize=1024)
def _encoded(name: str) -> bytes:
    return encode(name)


def aligned(nbytes: int) -> int:
    """Rounded up to the record grid."""
    return -(-nbytes // ALIGN) * ALIGN


def parse_segment(data: bytes, number: int, identity: bytes | None) -> SegmentHeader | str:
    """The header of a segment, or why it is not one to use; identity None: any will do."""
    if len(data) < SEGMENT_HEADER:
        return "truncated"
    magic, version, found, salt, theirs = _SEGMENT.unpack_from(data)
    if magic != _SEGMENT_MAGIC:
        return "not_a_segment"
    if version != VERSION:
        return "other_format"  # before the checksum, which another format may keep elsewhere
    (total,) = _SUM.unpack_from(data, _SEGMENT.size)
    if total != xxhash.xxh3_64_intdigest(data[: _SEGMENT.size]) or found != number:
        return "damaged_header"
    if identity not in (None, theirs):
        return "other_identity"
    return SegmentHeader(found, salt, theirs)


def pack(header: Header, segment: SegmentHeader, offset: int) -> bytes:
    """State word, header and checksum, for a record at `offset` of a segment.

    Raises:
        ValueError: the header is larger than a reader would accept.
    """
    if header.header_bytes > HEADER_LIMIT:
        raise ValueError(f"{header.header_bytes=} is over {HEADER_LIMIT=}")
    kind = header.kind.encode()
    parts = [
        _FIXED.pack(
            VERSION,
            header.header_bytes,
            len(kind),
            len(header.key),
            len(header.components),
            len(header.meta),
            segment.number,
            offset,
            header.generation,
            header.depth,
            header.payload_bytes,
            segment.identity,
        ),
        kind,
        header.key,
        header.meta,
    ]
    for component in header.components:
        name = component.name.encode()
        parts += [_COMPONENT.pack(len(name), component.nbytes, component.checksum), name]
    body = b"".join(parts)
    return LIVE + body + _SUM.pack(xxhash.xxh3_64_intdigest(segment.salt + body))


def header_size(data: bytes) -> int:
    """Bytes of the header that begins with `data` (at least PEEK bytes), 0 if it cannot be one."""
    if len(data) < PEEK:
        return 0
    version, size = struct.unpack_from("<HI", data, STATE)
    return size if version == VERSION and PEEK + _SUM.size <= size <= HEADER_LIMIT else 0


def parse(data: bytes, segment: SegmentHeader, offset: int) -> Header | None:
    """The header in `data`, exactly as long as it says; None if a single bit is wrong."""
    if header_size(data) != len(data):
        return None
    body = data[STATE : -_SUM.size]
    (total,) = _SUM.unpack_from(data, len(data) - _SUM.size)
    if total != xxhash.xxh3_64_intdigest(segment.salt + body):
        return None
    fixed = _FIXED.unpack_from(body)
    kind_bytes, key_bytes, count, meta_bytes, number, at, generation, depth = fixed[2:10]
    if (number, at, fixed[11]) != (segment.number, offset, segment.identity):
        return None
    kind, key, meta, rest = _split(body[_FIXED.size :], (kind_bytes, key_bytes, meta_bytes))
    components = []
    for _ in range(count):
        name_bytes, nbytes, checksum = _COMPONENT.unpack_from(rest)
        name, rest = _split(rest[_COMPONENT.size :], (name_bytes,))
        components.append(Component(name.decode(), nbytes, checksum))
    return Header(kind.decode(), key, depth, generation, tuple(components), meta)


def _split(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]
