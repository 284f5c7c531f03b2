"""What decode attention is given."""

from typing import NamedTuple

import jax

from hetero_kv.attention.pool import Pool


class Window(NamedTuple):
    """The ring of a window, and which of its rows one query sees.

    Row s of the ring holds the newest position p <= `position` with p % W == s. It is seen iff
    0 <= p < stop: a sequence that does not run has not written its own position (stop = position).
    """

    rows: jax.Array  # [L, R, W, c]
    position: jax.Array  # i32[R], of the query
    stop: jax.Array  # i32[R]


class Entries(NamedTuple):
    """Compressed entries: the first `visible` of each sequence, or those that were picked."""

    pool: Pool  # [L, R, N, c], or pages [L, P, e, c] with block tables; or bytes of these
    visible: jax.Array  # i32[R], entries that exist
    picked: jax.Array | None  # i32[R, k], entries to attend; negative: none. None: all visible


class Operands(NamedTuple):
    """Arrays of one call; keys are values too (the shared-latent form)."""

    q: jax.Array  # [R, H, c], rotated
    sinks: jax.Array | None  # f32[H]
    layer: int | jax.Array  # i32[], which of the stacked layers
    window: Window | None
    entries: Entries | None
