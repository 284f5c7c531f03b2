"""Static validation that ops share: shapes and dtypes, with messages that name the value."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.attention import pool as attention_pool
from hetero_kv.attention.pool import Paged, Pool
from hetero_kv.kernels import paging
from hetero_kv.packing import Packed

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


def pool(name: str, value: Pool | Packed, batch: int, width: int) -> None:
    """Raises as `shape` and `floating` do for a pool of rows of `width` channels."""
    packing, stored = paging.packing(value), paging.stored(value)
    if packing and packing.width != width:
        raise ValueError(f"{name} has packed rows of {packing.width} values, not of {width}")
    size = packing.bytes if packing else width
    if isinstance(stored, Paged):
        shape(f"{name}.pages", stored.pages, (None, None, None, size))
        shape(f"{name}.read", stored.read, (batch, None), integer=True)
    else:
        shape(name, stored, (None, batch, None, size))
    if not packing:
        floating(name, stored.pages if isinstance(stored, Paged) else stored)
    elif paging.dtype(value) != jnp.uint8:
        raise ValueError(f"{name} has packed rows, which are uint8, not {paging.dtype(value)}")


def tile(size: int, value: Pool | Packed) -> None:
    """Raises ValueError where a pool cannot be read in tiles of `size` entries."""
    count("tile", size)
    stored = paging.stored(value)
    rows = attention_pool.rows(stored)
    if size > rows or (not isinstance(stored, Paged) and rows % size):
        raise ValueError(f"tile={size} must divide the {rows} entries that a sequence can have")
