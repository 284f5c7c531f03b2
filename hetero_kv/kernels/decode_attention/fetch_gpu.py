"""Where the rows of a tile of decode attention are, for copies into a GPU's shared memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from hetero_kv.kernels.decode_attention.plan_gpu import Plan


def tile(
    plan: Plan,
    refs: Sequence[Any],
    layer: jax.Array,
    row: jax.Array,
    tile: jax.Array,
    copy: Callable[[Any, int], None],
) -> None:
    """Calls copy(source, j) for each copy j of a tile: always as many, of `plan.copy` rows.

    refs: the window's rows, if there is one; places and pages, if there are entries.
    """
    many = plan.tile // plan.copy

    def window() -> None:
        rows = refs[0]
        for j in range(many):
            # A window shorter than a tile is repeated; what is repeated is not seen.
            first = jax.lax.rem((tile * many + j) * plan.copy, plan.window)
            first = pl.multiple_of(first, plan.copy)
            copy(rows.at[layer, row, pl.ds(first, plan.copy)], j)

    def entries() -> None:
        places, pages = refs[-2:]
        for j in range(many):
            at = (tile - plan.window_tiles) * many + j
            first = pl.multiple_of(places[row, at, 1], plan.copy)
            copy(pages.at[layer, places[row, at, 0], pl.ds(first, plan.copy)], j)

    if not plan.page:
        window()
    elif not plan.window:
        entries()
    else:
        jax.lax.cond(tile < plan.window_tiles, window, entries)
