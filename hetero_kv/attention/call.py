"""What one call of the model tells every attention layer, and the view of a layer's leaves."""

import dataclasses
from typing import NamedTuple, Protocol

import jax

from hetero_kv.attention.rope import Rope, Table
from hetero_kv.contract import LayerSpec
from hetero_kv.params import Params, ParamTree


class Call(NamedTuple):
    """One prefill call of S columns, or one decode step (S = 1), over R rows.

    Row r runs the tokens at positions `start[r] + j` for `j < count[r]`; other columns are
    padding, which enters no state.
    """

    start: jax.Array  # i32[R], length before the call
    count: jax.Array  # i32[R], tokens that really run
    positions: jax.Array  # i32[R, S]
    tables: dict[Rope, Table]  # rotation tables at `positions`, [R, S, dim]
    first: jax.Array  # i32[R], window rows before this position are absent (replay), else 0
    replay: bool | jax.Array  # bool[]: read History, write Window and Point leaves only. Traced
    # in prefill, so that a replay runs the very program that prefill runs, and has its bits.

    @property
    def stop(self) -> jax.Array:
        """i32[R], length after the call."""
        return self.start + self.count


class View(NamedTuple):
    """The leaves of a stack of equal layers, and which of them this is.

    Leaves are `[L, R, ...]`; `layer` may be traced (inside a scan over layers).
    """

    leaves: dict[str, jax.Array]
    layer: int | jax.Array

    def update(self, **leaves: jax.Array) -> "View":
        """A view with some leaves exchanged."""
        return self._replace(leaves={**self.leaves, **leaves})


@dataclasses.dataclass(frozen=True)
class Train:
    """Static options of the differentiable forward."""

    select: str = "topk"  # "topk": what inference does; "all": dense warm-up of an indexer
    aux: bool = False  # also return auxiliary losses and attention targets


class Mechanism(Protocol):
    """One attention mechanism: frozen, hashable, with everything static inside."""

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The frequencies that it needs tables of, at the positions of a call."""

    def params(self) -> ParamTree:
        """Its weights."""

    def spec(self) -> LayerSpec:
        """Its cached leaves, a contract each."""

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x [B, T, d] from position 0, no cache, differentiable: (y [B, T, d], auxiliaries)."""

    def prefill(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """x [R, S, d] of one call: (y [R, S, d], leaves after the call)."""

    def decode(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """x [R, 1, d], one token a row."""
