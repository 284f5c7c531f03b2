"""Static validation that ops share: shapes and dtypes, with messages that name the value."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.attention import pool as attention_pool
from hetero_kv.attention.pool import Paged, Pool
from hetero_kv.attention.ring import Ring
from hetero_kv.packing import Packed, Packing

TILE = 64  # entries that references read at a time, unless told otherwise

Tree = TypeVar("Tree")


def as_jax(tree: Tree) -> Tree:
    """The same with numpy arrays as JAX arrays; numbers stay what they are."""
    numpy = (np.ndarray, np.generic)
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, numpy) else x, tree)


def count(name: str, value: Any, least: int = 1) -> None:
    """Raises ValueError for what is not an integer of at least `least`; 8.0 is none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def counts(name: str, sizes: Any, least: int = 1) -> None:
    """As `count`, for every field of a dataclass."""
    for field, value in dataclasses.asdict(sizes).items():
        count(f"{name}.{field}", value, least)


def tiles(value: Any, kind: type) -> None:
    """Raises ValueError for tile sizes that are not of the named kernel; None is right."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(
            f"tiles={value!r} must be a {kind.__module__}.{kind.__qualname__}, or None"
        )


def layer(value: Any) -> None:
    """Raises ValueError for what is no integer scalar."""
    if np.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        raise ValueError(f"layer must be an integer scalar, got {value!r}")


def shape(name: str, array: Any, want: tuple[int | None, ...], integer: bool = False) -> None:
    """Raises ValueError where the shape is another (None: any size but 0), or where `integer` and
    it is not int32."""
    have = array.shape
    fits = len(have) == len(want) and all(w in (None, h) for w, h in zip(want, have, strict=True))
    if not fits or 0 in have:
        axes = ", ".join("any" if w is None else str(w) for w in want)
        raise ValueError(f"{name} must be [{axes}] without empty axes, got {list(have)}")
    if integer and array.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, got {array.dtype}")


def floating(name: str, array: Any) -> None:
    """Raises ValueError for a type that is no float, NotImplementedError for a quantised one."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be of a floating type, got {array.dtype}")
    if jnp.dtype(array.dtype).itemsize < 2:
        raise NotImplementedError(
            f"{name} is {array.dtype}: quantised rows are the bytes of a Packed, with their scales"
        )


def pool(name: str, value: Pool, batch: int, width: int) -> Any:
    """The array of rows of a pool, checked; of packed rows what they are read as."""
    if isinstance(value, Packed):
        _width(name, value.packing, width)
        return as_read(pool(name, value.rows, batch, value.packing.bytes), value.packing)
    if isinstance(value, Paged):
        shape(f"{name}.pages", value.pages, (None, None, None, width))
        shape(f"{name}.read", value.read, (batch, None), integer=True)
        return value.pages
    shape(name, value, (None, batch, None, width))
    return value


def ring(name: str, value: Ring, batch: int, width: int) -> Any:
    """The array of rows of a ring, checked; of packed rows what they are read as."""
    if not isinstance(value, Packed):
        shape(name, value, (None, batch, None, width))
        return value
    _width(name, value.packing, width)
    shape(name, value.rows, (None, batch, None, value.packing.bytes))
    return as_read(value.rows, value.packing)


def as_read(rows: Any, packing: Packing) -> Any:
    """Shape and dtype of what is read of packed rows u8[..., bytes]; `Paged` ones stay in pages."""
    if isinstance(rows, Paged):
        return rows._replace(pages=as_read(rows.pages, packing))
    if rows.dtype != jnp.uint8 or rows.shape[-1] != packing.bytes:
        raise ValueError(
            f"{packing.kind} rows are uint8[{packing.bytes}], got {rows.dtype}{list(rows.shape)}"
        )
    return jax.ShapeDtypeStruct((*rows.shape[:-1], packing.width), jnp.dtype(packing.dtype))


def _width(name: str, packing: Packing, width: int) -> None:
    if packing.width != width:
        raise ValueError(f"{name} is packed from {packing.width} values a row, not {width}")


def tile(size: int, value: Pool) -> None:
    """Raises ValueError where a pool cannot be read in tiles of `size` entries."""
    count("tile", size)
    rows = attention_pool.rows(value)
    if size > rows or (not attention_pool.paged(value) and rows % size):
        raise ValueError(f"tile={size} must divide the {rows} entries that a sequence can have")
