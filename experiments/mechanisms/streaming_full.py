"""Full attention of which only the last tokens, and perhaps the first ones, are left.

What StreamingLLM (arXiv 2309.17453) does to a model that was trained with full attention. Kept
tokens stay at their own positions here; there they are moved up to the window.
"""

import dataclasses

import jax

from hetero_kv.attention import full
from hetero_kv.attention.call import Call, Train
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.full import Full
from hetero_kv.params import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streaming(Full):
    """width: last tokens, the current one included; first: kept from the beginning."""

    width: int
    first: int

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `Mechanism.forward`."""
        q, rows = self.heads.project(params, x, call.tables[self.heads.rope])
        queries, keys = call.positions[:, :, None], call.positions[:, None, :]
        mask = (keys <= queries) & ((queries - keys < self.width) | (keys < self.first))
        state = self.heads.begin(params, q)
        state = self.heads.form.add(state, q, rows, mask, self.heads.scale)
        return self.heads.output(params, state, x), {}


def build(fields: Fields) -> Streaming:
    """From the fields of a full layer; its own: stream_width, stream_first."""
    width, first = fields.stream_width, fields.stream_first
    if width < 1 or first < 0:
        raise ValueError(f"stream_width={width} must be >= 1 and stream_first={first} >= 0")
    return Streaming(**vars(full.build(fields)), width=width, first=first)
