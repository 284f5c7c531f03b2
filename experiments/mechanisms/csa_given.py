"""CSA whose entries are picked by scores that are given, for training forwards only."""

import dataclasses

import jax

from hetero_kv.attention import csa
from hetero_kv.attention.call import Call
from hetero_kv.attention.compressed import Compressed
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.latent_heads import Heads
from hetero_kv.params import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Given(Compressed):
    """given: f32[B, T, N], higher is picked first."""

    given: jax.Array | None = None

    def index_scores(self, params: Params, x: jax.Array, heads: Heads, call: Call) -> jax.Array:
        """What was given."""
        return self.given


def parts(fields: Fields) -> dict:
    """The parts of the CSA layer that the fields describe.

    Raises:
        ValueError: The layer has no indexer.
    """
    made = csa.build(fields)
    if made.indexer is None:
        raise ValueError(f"layer type {fields.kind!r} has no indexer whose picks could be replaced")
    return vars(made)
