"""CSA that picks entries at random: what a selection is worth that knows nothing."""

import dataclasses

import jax

from experiments.mechanisms.csa_given import parts
from hetero_kv.attention.call import Call
from hetero_kv.attention.compressed import Compressed
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.latent_heads import Heads
from hetero_kv.params import Params


@dataclasses.dataclass(frozen=True)
class Random(Compressed):
    """Weights are those of a CSA layer. Each query draws anew, the same at every call."""

    def index_scores(self, params: Params, x: jax.Array, heads: Heads, call: Call) -> jax.Array:
        """Uniform scores f32[B, T, N]."""
        count = x.shape[1] // self.entries.ratio
        return jax.random.uniform(jax.random.key(0), (*x.shape[:2], count))


def build(fields: Fields) -> Random:
    """From the fields of a CSA layer."""
    return Random(**parts(fields))
