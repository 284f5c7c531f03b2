"""Full attention: grouped-query heads with RoPE over every earlier token."""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, pool
from hetero_kv.attention.call import Call, Train, View
from hetero_kv.attention.entries import EntryPool
from hetero_kv.attention.norm import rms_norm
from hetero_kv.attention.rope import Rope, Table, rotate
from hetero_kv.contract import LayerSpec
from hetero_kv.params import Params, ParamSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class Full:
    """heads query heads share kv_heads keys and values of `dim` channels."""

    d_model: int
    heads: int
    kv_heads: int
    dim: int
    rope: Rope
    qk_norm: bool
    sinks: bool
    eps: float
    cache: EntryPool  # ratio 1: one row per token, its keys and then its values

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"n_kv_heads={self.kv_heads} must divide n_heads={self.heads}")

    def params(self) -> ParamTree:
        """Projections, optional norms of q and k, optional sinks."""
        wide, narrow = self.heads * self.dim, self.kv_heads * self.dim
        tree = {
            "q": ParamSpec((self.d_model, wide)),
            "k": ParamSpec((self.d_model, narrow)),
            "v": ParamSpec((self.d_model, narrow)),
            "o": ParamSpec((wide, self.d_model)),
        }
        if self.qk_norm:
            tree |= {
                name: ParamSpec((self.dim,), "ones", dtype="float32")
                for name in ("q_norm", "k_norm")
            }
        return tree | (
            {"sinks": ParamSpec((self.heads,), "zeros", dtype="float32")} if self.sinks else {}
        )

    def spec(self) -> LayerSpec:
        """One row per token."""
        return LayerSpec("full", tuple(self.cache.leaves().items()))

    def _project(self, params: Params, x: jax.Array, turn: Table) -> tuple[jax.Array, jax.Array]:
        """q [R, S, G, h, c], and the rows to cache [R, S, 2 * G * c]."""
        lead = x.shape[:-1]
        q = jnp.matmul(x, params["q"]).reshape(*lead, self.heads, self.dim)
        k = jnp.matmul(x, params["k"]).reshape(*lead, self.kv_heads, self.dim)
        v = jnp.matmul(x, params["v"])
        if self.qk_norm:
            q = rms_norm(q, params["q_norm"], self.eps)
            k = rms_norm(k, params["k_norm"], self.eps)
        turn = Table(turn.cos[..., None, :], turn.sin[..., None, :])
        q, k = rotate(q, turn), rotate(k, turn)
        q = q.reshape(*lead, self.kv_heads, self.heads // self.kv_heads, self.dim)
        row = jnp.concatenate([k.reshape(*lead, -1), v], axis=-1)
        return q, row.astype(self.cache.dtype)

    def _split(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        halves = rows.reshape(*rows.shape[:-1], 2, self.kv_heads, self.dim)
        return halves[..., 0, :, :], halves[..., 1, :, :]

    def _begin(self, params: Params, q: jax.Array) -> attend.State:
        sinks = params.get("sinks")
        sinks = None if sinks is None else sinks.reshape(q.shape[-3:-1])
        return attend.begin(q.shape[:-1], self.dim, sinks)

    def _output(self, params: Params, state: attend.State, x: jax.Array) -> jax.Array:
        out = attend.finish(state).astype(x.dtype)
        return jnp.matmul(out.reshape(*x.shape[:-1], -1), params["o"])

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `Mechanism.forward`."""
        q, rows = self._project(params, x, call.tables[self.rope])
        k, v = self._split(rows)
        mask = call.positions[:, None, :] <= call.positions[:, :, None]
        state = self._begin(params, q)
        state = attend.add_grouped(state, q, k, v, mask, self.dim**-0.5)
        return self._output(params, state, x), {}

    def prefill(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.prefill`. In a replay the stored rows are read and none is written."""
        q, rows = self._project(params, x, call.tables[self.rope])
        view = self.cache.append(view, call, call.start, rows, call.count)
        stored, size = view.leaves[self.cache.name], self.cache.tile

        def body(t: jax.Array, state: attend.State) -> attend.State:
            index = t * size + jnp.arange(size, dtype=jnp.int32)
            part = pool.tile(stored, view.layer, t, size)
            k, v = self._split(attend.clean(part, index < call.stop[:, None]))
            mask = (index <= call.positions[..., None]) & (index < call.stop[:, None, None])
            return attend.add_grouped(state, q, k, v, mask, self.dim**-0.5)

        state = jax.lax.fori_loop(0, self.cache.tiles(call), body, self._begin(params, q))
        return self._output(params, state, x), view

    def decode(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.decode`: a prefill of one token."""
        return self.prefill(params, x, view, call)
