"""The online softmax of a GPU without tensor cores, which round float32 to 10 bits.

As `attend_gpu`, with tiles of 16 rows. Each warpgroup owns up to 128 channels: it adds up its part
of the scores of 8 rows at a time, and of the weighted rows. Parts of scores meet in shared memory,
which is used in turns, so that one barrier a tile is enough.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.attention.attend import MASKED
from hetero_kv.kernels import attend_gpu, hopper
from hetero_kv.kernels.attend_gpu import ACROSS, VECTOR, State, filled, spread
from hetero_kv.kernels.hopper import ROWS

TILE = 16
COLUMNS = 128  # of a warpgroup
STEP = 8  # channels, and rows, that are multiplied at a time
PIECE = 32  # channels of a sum


def parts(width: int) -> int:
    """Warpgroups that compute, each its own channels."""
    return -(-width // COLUMNS)


def check(name: str, width: int) -> None:
    """Raises NotImplementedError for so many channels."""
    if width > 4 * COLUMNS or width % (COLUMNS if width > COLUMNS else 64):
        raise NotImplementedError(
            f"{name}: {width} channels of float32; 64, or a multiple of {COLUMNS} up to 512"
        )


def memory(width: int) -> tuple:
    """Shared memory for queries and for parts of scores, and the barrier of the latter."""
    many = parts(width)
    return (
        plgpu.SMEM((many, ROWS, width // many), jnp.float32),
        plgpu.SMEM((2, many, TILE, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=many),
    )


def buffer(width: int, dtype: Any) -> Callable[[int], Any]:
    """Shared memory of rows, for so many tiles."""
    many = parts(width)
    return lambda stages: plgpu.SMEM((stages, many, TILE, width // many), dtype)


def copy(source: Any, rows: Any, first: int, barrier: Any) -> None:
    """Starts the copies of rows [n, width] to `first ..` of a tile: as many as there are parts."""
    many, _, columns = rows.shape
    for part in range(many):
        own = source.at[:, pl.ds(part * columns, columns)]
        there = rows.at[part, pl.ds(first, source.shape[0])]
        plgpu.copy_gmem_to_smem(own, there, barrier)


def begin(width: int, top: jax.Array | None = None, total: float = 0.0) -> State:
    """Nothing seen. top, total: of sinks, f32[64] and 1."""
    return attend_gpu.begin([PIECE] * (width // parts(width) // PIECE), top, total)


def add(
    state: State,
    held: tuple,
    rows: Any,
    wg: jax.Array,
    turn: jax.Array,
    seen: Callable[[int], jax.Array],
    there: Callable[[int], jax.Array],
    scale: float,
) -> State:
    """Attends to a tile.

    Args:
        held: what `memory` asked for.
        rows: [parts, 16, columns] in shared memory, float32 or bfloat16.
        wg: which warpgroup this is; turn: 0 and 1, in turns.
        seen: bool[64] of a row of the tile, which query sees it.
        there: f32[], 1 for a row that any query sees; others may be NaN.
        scale: of logits.
    """
    q, sums, joined = held
    many, _, columns = rows.shape

    def part_of_scores(first: int) -> list:
        """This warpgroup's part of the scores of STEP rows, f32[64] each."""

        def body(c, found):
            channels = pl.ds(pl.multiple_of(c * STEP, STEP), STEP)
            own = hopper.load(q.at[wg, :, channels], plgpu.Layout.WGMMA)
            keys = [hopper.load(rows.at[wg, first + j, channels], ACROSS) for j in range(STEP)]
            return [
                old + own * spread(key.astype(jnp.float32), 1, STEP)
                for old, key in zip(found, keys, strict=True)
            ]

        start = [filled(0.0, (ROWS, STEP), plgpu.Layout.WGMMA) for _ in range(STEP)]
        return [jnp.sum(x, axis=1) for x in jax.lax.fori_loop(0, columns // STEP, body, start)]

    for first in range(0, TILE, STEP):
        for j, part in enumerate(part_of_scores(first)):
            sums[turn, wg, first + j] = part
    plgpu.barrier_arrive(joined)
    plgpu.barrier_wait(joined)
    for first in range(0, TILE, STEP):
        live, scores = [], []
        for j in range(first, first + STEP):
            # A row that is not seen may be NaN: both it and its score are replaced.
            live.append(seen(j))
            score = filled(0.0, (ROWS,), VECTOR)
            for part in range(many):
                score += hopper.load(sums.at[turn, part, j], VECTOR)
            scores.append(jnp.where(live[-1], score * scale, MASKED))
        top = functools.reduce(jnp.maximum, scores, state.top)
        shrink = jnp.exp(state.top - top)
        total, pieces = state.total * shrink, []
        weights = [
            jnp.where(see, jnp.exp(score - top), 0.0)
            for see, score in zip(live, scores, strict=True)
        ]
        for weight in weights:
            total += weight
        for p, old in enumerate(state.sums):
            old = old * spread(shrink, 0, PIECE)
            for j, weight in enumerate(weights, first):
                key = hopper.load(rows.at[wg, j, pl.ds(p * PIECE, PIECE)], ACROSS)
                here = filled(there(j), (PIECE,), ACROSS) > 0.5
                key = jnp.where(here, key.astype(jnp.float32), 0.0)
                old += spread(weight, 0, PIECE) * spread(key, 1, PIECE)
            pieces.append(old)
        state = State(pieces, top, total)
    plgpu.commit_smem()  # loads are over before a copy may write there
    return state
