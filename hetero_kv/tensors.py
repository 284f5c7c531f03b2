"""Named arrays as bytes in the safetensors format: a JSON header, then raw little-endian data.

The library's own numpy functions know no small floats, and its way to write raw data is another one
in each version; it is what reads and checks a file.
"""

import json
import sys
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import safetensors

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
        parts.append(_little(raw, value.itemsize).tobytes())
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
    try:
        found = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None
    arrays = {}
    for name, about in found:
        if about["dtype"] not in _DTYPES:
            raise ValueError(f"{name}: there is no dtype {about['dtype']!r} here")
        dtype = jnp.dtype(_DTYPES[about["dtype"]])
        raw = np.array(_little(np.frombuffer(about["data"], np.uint8), dtype.itemsize))
        arrays[name] = raw.reshape(-1).view(dtype).reshape(about["shape"])
    return arrays


def _little(raw: np.ndarray, size: int) -> np.ndarray:
    """Bytes of values of `size` bytes from this machine's order to the format's, and back."""
    return raw if sys.byteorder == "little" or size == 1 else raw.reshape(-1, size)[:, ::-1]
