"""An injective byte encoding of plain values, equal in every process and Python version.

Every value is framed as `tag (1 byte) | length (8 bytes, little-endian) | body`, so that no two
different values, however nested, share an encoding. Mappings are sorted by encoded key.
"""

import dataclasses
import hashlib
import struct
from collections.abc import Mapping

import numpy as np


def _frame(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<Q", len(body)) + body


def encode(value: object) -> bytes:
    """Encodes None, bool, int, float, str, bytes, dtypes, sequences, mappings, dataclasses.

    A dataclass is encoded as the mapping of its fields: its name carries no meaning. Numpy
    scalars count as the Python value they hold.

    Raises:
        TypeError: anything else; guessing (`repr`, `str`) would not be injective.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return _frame(b"n", b"")
    if isinstance(value, bool):
        return _frame(b"?", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _frame(b"i", b"%d" % value)
    if isinstance(value, float):
        return _frame(b"f", struct.pack("<d", value))
    if isinstance(value, str):
        return _frame(b"s", value.encode("utf-8"))
    if isinstance(value, bytes):
        return _frame(b"b", value)
    if isinstance(value, np.dtype):
        return _frame(b"d", value.name.encode())
    if isinstance(value, list | tuple):
        return _frame(b"l", b"".join(encode(x) for x in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {x.name: getattr(value, x.name) for x in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        items = sorted((encode(key), encode(item)) for key, item in value.items())
        return _frame(b"m", b"".join(key + item for key, item in items))
    raise TypeError(f"cannot encode {type(value).__name__} injectively: {value!r}")


def frames(message: bytes) -> list[tuple[bytes, bytes]] | None:
    """(tag, body) of each value of an encoded sequence; None if it is nothing of that kind."""
    found = []
    if message[:1] != b"l" or message[1:9] != struct.pack("<Q", len(message) - 9):
        return None
    at = 9
    while at < len(message):
        stop = at + 9
        if stop > len(message):
            return None
        stop += struct.unpack("<Q", message[at + 1 : stop])[0]
        if stop > len(message):
            return None
        found.append((message[at : at + 1], message[at + 9 : stop]))
        at = stop
    return found


def decode_bytes(message: bytes) -> list[bytes] | None:
    """The values of an encoded sequence of bytes; None if it is nothing of that kind."""
    found = frames(message)
    if found is None or any(tag != b"b" for tag, _ in found):
        return None
    return [body for _, body in found]


def digest(value: object) -> str:
    """sha256 of the encoding, in hex."""
    return hashlib.sha256(encode(value)).hexdigest()
