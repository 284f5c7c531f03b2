"""What the indexer is given."""

from typing import NamedTuple

import jax

from hetero_kv.attention.pool import Pool


class Operands(NamedTuple):
    """Arrays of one call."""

    q: jax.Array  # [R, heads, dim], rotated
    weights: jax.Array  # f32[R, heads], scaled
    layer: int | jax.Array  # i32[], which of the stacked layers
    keys: Pool  # [L, R, N, dim], or pages [L, P, e, dim] with block tables; or bytes
    visible: jax.Array  # i32[R], entries that the query sees
