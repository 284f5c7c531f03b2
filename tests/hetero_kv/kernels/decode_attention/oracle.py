"""Decode attention from the equations, in float64, one query and head at a time; and random cases.

`o_h = sum_j p_hj * row_j`, `p_hj = exp(q_h . row_j * scale) / (sum exp + exp(sink_h))`, over the
rows of positions `t - W + 1 .. t` and over entries.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from hetero_kv.attention.pool import Paged
from hetero_kv.kernels.decode_attention.operands import Entries, Window
from hetero_kv.packing import Packing
from tests.hetero_kv.kernels import pools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and options of a random case; position[r] is that of sequence r's query."""

    position: tuple[int, ...]
    heads: int = 4
    width: int = 16
    window: int = 0  # W; 0: none
    ratio: int = 0  # tokens per entry; 0: no entries
    capacity: int = 64  # entries
    page: int = 8  # entries per page; 0: a contiguous pool
    picks: int = 0  # k; 0: all visible
    shared: int = 0  # pages that all sequences share
    sinks: bool = True
    stopped: tuple[int, ...] = ()  # sequences that do not run
    dtype: str = "float32"
    packing: Packing | None = None  # of entries


@dataclasses.dataclass(frozen=True)
class Data:
    """What a case gives to the op, and what the oracle says."""

    q: np.ndarray
    arguments: dict  # of api.decode_attention, without q
    want: np.ndarray


def make(case: Case, seed: int = 0) -> Data:
    """Random data. Everything that nobody may read is NaN."""
    rng = np.random.default_rng(seed)
    batch, layers, layer = len(case.position), 3, 1
    dtype = np.dtype(jnp.dtype(case.dtype))

    def random(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32).astype(dtype)

    q = random(batch, case.heads, case.width)
    sinks = rng.normal(size=case.heads).astype(np.float32) if case.sinks else None
    position = np.array(case.position, np.int32)
    runs = np.array([r not in case.stopped for r in range(batch)])
    stop = position + runs.astype(np.int32)
    keys: list[list[np.ndarray]] = [[] for _ in range(batch)]
    arguments: dict = {"sinks": sinks, "scale": case.width**-0.5}

    if case.window:
        ring = np.full((layers, batch, case.window, case.width), np.nan, dtype)
        for r in range(batch):
            # Row t - W is still there where the sequence does not run: nobody may read it.
            for p in range(max(0, position[r] - case.window), position[r] + 1):
                row = random(case.width)
                if p < stop[r]:
                    ring[layer, r, p % case.window] = row
                    if p > position[r] - case.window:
                        keys[r].append(row)
        arguments["window"] = Window(ring, position, stop)

    if case.ratio:
        rows = random(batch, case.capacity, case.width)
        for r in range(1, batch):
            rows[r, : case.shared * case.page] = rows[0, : case.shared * case.page]
        held, rows = pools.quantised(case.packing, rows)
        visible = np.minimum(stop // case.ratio, case.capacity).astype(np.int32)
        if case.page:
            made = pools.paged(rng, held, visible, case.page, layers=layers, shared=case.shared)
            layer_pages = pools.poison(made.pages.shape, made.pages.dtype)
            layer_pages[layer] = made.pages[made.layer]
            pool = Paged(layer_pages, made.table, made.table)
        else:
            pool = pools.poison((layers, *held.shape), held.dtype)
            for r in range(batch):
                pool[layer, r, : visible[r]] = held[r, : visible[r]]
        picked = None
        if case.picks:
            picked = np.full((batch, case.picks), -1, np.int32)
            for r in range(batch):
                some = rng.permutation(int(visible[r]))[: case.picks]
                picked[r, : len(some)] = some
                keys[r] += [rows[r, i] for i in some]
        else:
            for r in range(batch):
                keys[r] += list(rows[r, : visible[r]])
        arguments["entries"] = Entries(pools.packed(case.packing, pool), visible, picked)

    want = np.stack([attend(q[r], keys[r], sinks, case.width**-0.5) for r in range(batch)])
    return Data(q, {**arguments, "layer": np.int32(layer)}, want)


def attend(q: np.ndarray, keys: list, sinks: np.ndarray | None, scale: float) -> np.ndarray:
    """f64[H, c] for q [H, c]."""
    out = np.zeros(q.shape, np.float64)
    if not keys:
        return out
    rows = np.stack(keys).astype(np.float64)
    for h in range(q.shape[0]):
        logits = rows @ q[h].astype(np.float64) * scale
        everything = logits if sinks is None else np.append(logits, sinks[h])
        weights = np.exp(logits - everything.max())
        out[h] = weights @ rows / np.exp(everything - everything.max()).sum()
    return out
