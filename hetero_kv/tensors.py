"""Named arrays as bytes in the safetensors format: a JSON header, then raw little-endian data."""

import json
import math
import sys
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
_DTYPES = {short: name for name, short in _NAMES.items()}


def dump(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The arrays as one file's bytes. Raises ValueError for a dtype that the format lacks."""
    header, parts, offset = {}, [], 0
    for name, value in arrays.items():
        value = np.asarray(value)
        if value.dtype.name not in _NAMES:
            raise ValueError(f"{name}: no safetensors dtype for {value.dtype}")
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if sys.byteorder != "little" and value.itemsize > 1:
            raw = raw.reshape(-1, value.itemsize)[:, ::-1]
        parts.append(raw.tobytes())
        stop = offset + len(parts[-1])
        header[name] = {
            "dtype": _NAMES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin aligned
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def parse(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of a file's bytes, copies of their own. Raises ValueError where it is damaged."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError(f"truncated: {len(data)} bytes, and a header of {size}")
    try:
        header = json.loads(data[8 : 8 + size])
        body, found, at = data[8 + size :], {}, 0
        for name, about in header.items():
            if name == "__metadata__":
                continue
            dtype = np.dtype(jnp.dtype(_DTYPES[about["dtype"]]))
            start, stop = about["data_offsets"]
            shape = tuple(about["shape"])
            if stop - start != math.prod(shape) * dtype.itemsize or start != at:
                raise ValueError(f"{name}: bytes {start}..{stop} do not hold {dtype}{list(shape)}")
            if stop > len(body):
                raise ValueError(f"{name}: truncated at {len(body)} of {stop} bytes of data")
            raw = np.frombuffer(body[start:stop], np.uint8)
            if sys.byteorder != "little" and dtype.itemsize > 1:
                raw = raw.reshape(-1, dtype.itemsize)[:, ::-1]
            found[name] = np.array(raw).reshape(-1).view(dtype).reshape(shape)
            at = stop
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the header is not one of safetensors: {error!r}") from None
    if at != len(body):
        raise ValueError(f"{len(body)} bytes of data, but the header tells of {at}")
    return found
