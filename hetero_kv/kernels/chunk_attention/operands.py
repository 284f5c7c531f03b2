"""What chunk attention is given."""

import dataclasses
from typing import NamedTuple

import jax

from hetero_kv.attention.pool import Pool
from hetero_kv.kernels import checks


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is static.

    ratio: tokens per entry; scale: of logits; tile: entries that the reference attends at a time.
    """

    scale: float
    ratio: int = 0
    tile: int = 64

    def __post_init__(self):
        checks.count("rule.ratio", self.ratio, 0)
        checks.count("rule.tile", self.tile)


class Window(NamedTuple):
    """The rows of a sliding window of W tokens: those from before the call, and the call's own.

    Row s of the ring holds the newest position p < start with p % W == s. Rows of positions before
    `first` are absent (a replay); so are those of negative ones.
    """

    rows: jax.Array  # [L, R, W, c], before the call's own rows are put in
    kv: jax.Array  # [R, S, c], the call's own
    first: jax.Array  # i32[R]


class Chosen(NamedTuple):
    """Which entries each query has picked: see `selection.chosen`."""

    order: jax.Array  # u32[R, S, N], order keys of scores
    low: jax.Array  # u32[R, S]
    cut: jax.Array  # i32[R, S]


class Entries(NamedTuple):
    """Compressed entries, those that close within the call among them."""

    pool: Pool  # [L, R, N, c], or pages [L, P, e, c] with block tables; or bytes of these
    chosen: Chosen | None  # None: every visible entry


class Operands(NamedTuple):
    """Arrays of one call; rows are keys and values of all heads (the shared-latent form)."""

    q: jax.Array  # [R, S, H, c], rotated; query j of a row is at position start + j
    sinks: jax.Array | None  # f32[H]
    layer: int | jax.Array  # i32[], which of the stacked layers
    start: jax.Array  # i32[R]
    count: jax.Array  # i32[R], queries that run; the others are padding
    window: Window | None
    entries: Entries | None
