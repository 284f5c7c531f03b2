"""CSA that picks the entries which the attention itself would weigh most, were all visible.

The share of every entry, averaged over heads, is what the indexer is taught to foretell
(`hetero_kv.attention.indexer.teach`): no indexer can pick better in that sense.
"""

import dataclasses

import jax

from experiments.mechanisms.csa_given import Given, parts
from hetero_kv.attention.call import Call, Train
from hetero_kv.attention.compressed import Compressed
from hetero_kv.attention.fields import Fields
from hetero_kv.params import Params


@dataclasses.dataclass(frozen=True)
class Oracle(Compressed):
    """Weights are those of a CSA layer; there is no cache."""

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `Mechanism.forward`."""
        if train.select != "topk":
            return super().forward(params, x, call, train)
        _, aux = super().forward(params, x, call, Train("all", aux=True))
        return Given(**vars(self), given=aux["targets"]).forward(params, x, call, train)


def build(fields: Fields) -> Oracle:
    """From the fields of a CSA layer."""
    return Oracle(**parts(fields))
