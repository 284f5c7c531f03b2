"""A cache without a model: every leaf is a known function of the tokens that it depends on.

`advance` plays the part of prefill: it writes what tokens would write, and nothing else, so stale
or missing state stays visible. `wrong_rows` compares a row of a cache with what it should hold.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv import state, validate
from hetero_kv.contract import (
    CacheSpec,
    Derived,
    Evidence,
    History,
    LayerSpec,
    Leaf,
    LeafSlot,
    Point,
    Scratch,
    Segment,
    Window,
)
from hetero_kv.state import Cache

MULTIPLIER = np.uint64(6364136223846793005)


def positions(of: str, rows: int) -> Leaf:
    return Leaf(
        contract=Evidence(of=of, kind="positions"), component="evidence", rows=rows, dtype="int32"
    )


def count(of: str) -> Leaf:
    return Leaf(contract=Evidence(of=of, kind="count"), component="evidence", dtype="int32")


COMPRESSED = LayerSpec(
    "compressed",
    (
        ("entries", Leaf(contract=History(4), component="csa entries", width=(3,), tile=4)),
        ("entries_count", count("entries")),
        ("keys", Leaf(contract=History(4), component="csa index keys", width=(2,))),
        ("keys_count", count("keys")),
        ("window", Leaf(contract=Window(8), component="windows", rows=11, width=(2,))),
        ("window_pos", positions("window", 11)),
        ("tail", Leaf(contract=Point(4, keep=4), component="tails", rows=8, width=(2,))),
        ("tail_pos", positions("tail", 8)),
        ("mask", Leaf(contract=Derived(), component="masks", rows=2)),
        ("scratch", Leaf(contract=Scratch(), component="scratch", rows=2)),
    ),
)
OVERLAPPING = LayerSpec(
    "overlapping",
    (
        ("nsa", Leaf(contract=History(4, span=8), component="nsa entries", width=(2,))),
        ("nsa_count", count("nsa")),
    ),
)
FULL = LayerSpec(
    "full",
    (
        (
            "kv",
            Leaf(contract=History(1), component="full kv", width=(2, 2), dtype="bfloat16"),
        ),
        ("kv_count", count("kv")),
    ),
)
RECURRENT = LayerSpec(
    "recurrent",
    (
        ("state", Leaf(contract=Point(), component="recurrent state", width=(2, 3))),
        ("conv", Leaf(contract=Point(), component="recurrent state", rows=3, width=(2,))),
    ),
)


def everything(chunk: int = 16, block: int = 8) -> CacheSpec:
    """Every kind of contract, stacked and not."""
    segments = (Segment(2, (COMPRESSED, OVERLAPPING)), Segment(1, (FULL, RECURRENT)))
    return CacheSpec(segments, chunk=chunk, block=block)


def only(*layers: LayerSpec, chunk: int = 16, block: int = 8, repeats: int = 1) -> CacheSpec:
    return CacheSpec((Segment(repeats, layers),), chunk=chunk, block=block)


def prefix_hashes(tokens: np.ndarray) -> np.ndarray:
    """u64[n]: element t depends on tokens 0 .. t."""
    found, h = [], np.uint64(1)
    with np.errstate(over="ignore"):
        for token in np.asarray(tokens):
            h = h * MULTIPLIER + np.uint64(int(token) + 1)
            found.append(h)
    return np.asarray(found, np.uint64)


def _values(hashes: np.ndarray, salt: int, width: tuple[int, ...], dtype: str) -> np.ndarray:
    """[n, *width], from u64[n]."""
    size = int(np.prod(width, dtype=np.int64))
    with np.errstate(over="ignore"):
        mixed = hashes[:, None] ^ (np.arange(size, dtype=np.uint64) * np.uint64(7919))[None]
        mixed = (mixed + np.uint64(salt)) * MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
        mixed *= MULTIPLIER
    value = (mixed >> np.uint64(44)).astype(np.float32) / np.float32(2**19) - 1
    return value.reshape(len(hashes), *width).astype(jnp.dtype(dtype))


def _salt(slot: LeafSlot, repeat: int) -> int:
    return sum(ord(c) * 257**i for i, c in enumerate(slot.path)) % 2**31 + 1000003 * repeat


def rows_of(slot: LeafSlot, repeat: int, hashes: np.ndarray, start: int, stop: int):
    """(row indices, values) that the tokens start .. stop - 1 write; later rows win."""
    leaf, contract = slot.leaf, slot.leaf.contract
    salt = _salt(slot, repeat)
    if isinstance(contract, History):
        index = np.arange(contract.count(start), contract.count(stop))
        last = index * contract.stride + contract.span - 1
        return index, _values(hashes[last], salt, leaf.width, leaf.dtype)
    if leaf.is_ring:
        at = np.arange(max(start, stop - leaf.rows), stop)
        return at % leaf.rows, _values(hashes[at], salt, leaf.width, leaf.dtype)
    if isinstance(contract, Point) and stop > start:
        shape = leaf.shape(0)
        return None, _values(hashes[stop - 1 : stop], salt, shape, leaf.dtype)[0]
    return None, None


def advance(
    spec: CacheSpec, cache: Cache, row: int, tokens: np.ndarray, stop: int, on_grid: bool = True
) -> Cache:
    """Row `row` runs `tokens[length:stop]` and leaves all other rows alone."""
    start = int(cache.length[row])
    hashes = prefix_hashes(tokens[:stop])
    changed = {}
    for slot in spec.slots():
        leaf = np.array(cache.leaf(slot))
        contract = slot.leaf.contract
        for repeat in range(slot.repeats):
            if isinstance(contract, Evidence):
                about = validate.owner(spec, slot).leaf
                if contract.kind == "count":
                    step = about.contract.count(stop) - about.contract.count(start)
                    leaf[repeat, row] += step
                else:
                    at = np.arange(max(start, stop - about.rows), stop)
                    leaf[repeat, row, at % about.rows] = at
            elif slot.leaf.dtype:
                index, value = rows_of(slot, repeat, hashes, start, stop)
                if index is not None:
                    leaf[repeat, row, index] = value
                elif value is not None:
                    leaf[repeat, row] = value
        changed[slot] = jnp.array(leaf)
    grid = int(cache.grid_length[row])
    if on_grid and grid == start:
        grid = stop // spec.chunk * spec.chunk
    length, grid_length = np.array(cache.length), np.array(cache.grid_length)
    length[row], grid_length[row] = stop, grid
    return cache.with_leaves(changed).replace(
        length=jnp.array(length), grid_length=jnp.array(grid_length)
    )


def empty(spec: CacheSpec, batch: int = 2, capacity: int = 64, garbage: bool = True) -> Cache:
    """A fresh cache; with `garbage`, rows that no contract counts as live hold noise."""
    cache = state.init(spec, batch, capacity)
    if not garbage:
        return cache
    rng = np.random.default_rng(0)

    def noise(slot: LeafSlot, leaf: jax.Array) -> jax.Array:
        live_at_0 = isinstance(slot.leaf.contract, Point) and not slot.leaf.contract.group
        if isinstance(slot.leaf.contract, Evidence) or live_at_0:
            return leaf
        return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

    return cache.with_leaves({x: noise(x, cache.leaf(x)) for x in spec.slots()})


def wrong_rows(spec: CacheSpec, cache: Cache, row: int, tokens: np.ndarray) -> list[str]:
    """Live rows of a row of the batch that differ, bit by bit, from a cold run's."""
    length = int(cache.length[row])
    hashes, found = prefix_hashes(tokens[:length]), []
    for slot in spec.slots():
        have = np.array(cache.leaf(slot))[:, row]
        contract = slot.leaf.contract
        for repeat in range(slot.repeats):
            name = f"{slot.path}[{repeat}]"
            if isinstance(contract, Evidence):
                about = validate.owner(spec, slot).leaf
                if contract.kind == "count":
                    ok = have[repeat] == about.contract.count(length)
                else:
                    live = about.live_rows(length)
                    ok = np.all((have[repeat] == about.ring_positions(length)) | ~live)
                found += [] if ok else [f"{name}: evidence"]
                continue
            want = np.array(have[repeat])
            index, value = rows_of(slot, repeat, hashes, 0, length)
            if isinstance(contract, Point) and not contract.group and not length:
                value = np.zeros_like(want)
            if index is None and value is None:
                continue
            if index is None:
                want[...] = value
                live = np.ones(1, bool)
            else:
                want[index] = value
                live = slot.leaf.live_rows(length, cache.capacity)
            same = want.view(np.uint8) == have[repeat].view(np.uint8)
            if index is not None:
                same = same.reshape(len(live), -1).all(axis=1) | ~live
            if not same.all():
                found.append(f"{name}: {np.flatnonzero(~same.reshape(-1))[:6]}")
    return found


def edit(cache: Cache, slot: LeafSlot, index: object, value: object, add: bool = False) -> Cache:
    """One leaf changed at `index` (of [repeats, R, ...]); in numpy, so that nothing compiles."""
    leaf = np.array(cache.leaf(slot))
    leaf[index] = leaf[index] + value if add else value
    return cache.with_leaves({slot: jnp.array(leaf)})
