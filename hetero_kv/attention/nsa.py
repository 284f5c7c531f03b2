"""NSA, native sparse attention: compressed blocks, selected blocks and a window, mixed by gates.

Each branch has keys and values of its own; queries are shared (arXiv 2502.11089). A query attends
all compressed blocks that end before it; the attention's shares, summed over the heads of a group,
pick the blocks of tokens that it attends whole, the first and the two last of which it always gets.
The paper does not say where rotary positions enter: here queries and keys are rotated at their own
positions, a compressed key at that of its block's first token.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention import attend, pool, ring, selection
from hetero_kv.attention.call import Call, Train, View
from hetero_kv.attention.entries import TILE, EntryPool
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.nsa_blocks import BlockCompressor, Blocks, closing, tail_leaves
from hetero_kv.attention.rope import Rope, Table, rotate, table
from hetero_kv.attention.window import WindowBranch
from hetero_kv.contract import LayerSpec
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamTree, matrix

BRANCHES = ("compress", "select", "window")
FORCED = 1e30  # importance of blocks that a query always gets


@dataclasses.dataclass(frozen=True)
class Nsa:
    """heads query heads share kv_heads keys and values of `dim` channels in each branch."""

    kind: str
    d_model: int
    heads: int
    kv_heads: int
    dim: int
    rope: Rope
    blocks: Blocks
    compressor: BlockCompressor
    entries: EntryPool
    tokens: EntryPool
    window: WindowBranch

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"n_kv_heads={self.kv_heads} must divide n_heads={self.heads}")
        if self.rope.dim > self.dim:
            raise ValueError(f"rope dim {self.rope.dim} exceeds head_dim {self.dim}")

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The frequencies of queries and keys."""
        return (self.rope,)

    @property
    def scale(self) -> float:
        """Of logits."""
        return self.dim**-0.5

    def params(self) -> ParamTree:
        """Queries, keys and values of each branch, the compressors of keys and values, gates."""
        narrow = self.kv_heads * self.dim
        tree: dict = {
            "q": matrix(self.d_model, self.heads * self.dim),
            "o": matrix(self.heads * self.dim, self.d_model),
            "gate": matrix(self.d_model, len(BRANCHES) * self.heads),
            "compress_k": self.compressor.params(),
            "compress_v": self.compressor.params(),
        }
        return tree | {f"kv_{x}": matrix(self.d_model, 2 * narrow) for x in BRANCHES}

    def spec(self) -> LayerSpec:
        """Compressed blocks with their tail, every token's row, and the window."""
        tail = tail_leaves(self.blocks, self.entries.width, self.entries.dtype)
        leaves = self.entries.leaves() | tail | self.tokens.leaves() | self.window.leaves()
        return LayerSpec(self.kind, tuple(leaves.items()))

    # -- pieces --------------------------------------------------------------------------------

    def _query(self, params: Params, x: jax.Array, turn: Table) -> jax.Array:
        q = linear(x, params["q"]).reshape(*x.shape[:-1], self.heads, self.dim)
        q = self._turn(q, turn)
        return q.reshape(*x.shape[:-1], self.kv_heads, self.heads // self.kv_heads, self.dim)

    def _turn(self, x: jax.Array, turn: Table) -> jax.Array:
        turn = Table(turn.cos[..., None, :], turn.sin[..., None, :])
        return rotate(x, turn, halves=self.rope.halves)

    def _rows(self, params: Params, x: jax.Array, branch: str, turn: Table | None) -> jax.Array:
        """Keys and then values [R, S, 2 * G * c]; turn: None for raw rows of the compressor."""
        row = linear(x, params[f"kv_{branch}"])
        if turn is not None:
            k, v = jnp.split(row, 2, axis=-1)
            k = self._turn(k.reshape(*k.shape[:-1], self.kv_heads, self.dim), turn)
            row = jnp.concatenate([k.reshape(v.shape), v], axis=-1)
        return row.astype(self.entries.dtype)

    def _compress(self, params: Params, rows: jax.Array, index: jax.Array) -> jax.Array:
        """Blocks [R, n, span, 2 * G * c] of entries i32[R, n] `index`: [R, n, 2 * G * c]."""
        k, v = jnp.split(rows, 2, axis=-1)
        k = self.compressor.pooled(params["compress_k"], k)
        v = self.compressor.pooled(params["compress_v"], v)
        k = self._turn(k, table(self.rope, index * self.blocks.stride, k.dtype))
        row = jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in (k, v)], axis=-1)
        return row.astype(self.entries.dtype)

    def _begin(self, q: jax.Array) -> attend.State:
        return attend.begin(q.shape[:-1], self.dim, None)

    def _shares(self, state: attend.State, q: jax.Array, rows: jax.Array, mask: jax.Array):
        """f32[R, S, G, K]: attention of rows [R, K, w], summed over the heads of a group."""
        k = rows.reshape(*rows.shape[:-1], 2, self.kv_heads, -1)[..., 0, :, :]
        dots = jnp.einsum(
            "rsghc,rkgc->rsghk", q, k.astype(q.dtype), preferred_element_type=jnp.float32
        )
        # Where nothing is visible `top` is the mask's: its exponential would be infinite, and the
        # gradient of what is masked after it not a number.
        seen = mask[:, :, None, None]
        share = jnp.exp(jnp.where(seen, dots * self.scale - state.top[..., None], 0.0))
        share = share / jnp.where(state.total > 0, state.total, 1.0)[..., None]
        share = jnp.where(seen, share, 0.0)
        total = share[..., 0, :]
        for head in range(1, share.shape[-2]):
            total = total + share[..., head, :]
        return total

    def _picked(
        self, shares: jax.Array, positions: jax.Array, count: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Keys u32[R, S * G, count] of blocks, and their thresholds (see `selection.chosen`)."""
        worth = self.blocks.importance(shares, count)
        block = jnp.arange(count, dtype=jnp.int32)
        last = (positions // self.blocks.select)[..., None, None]
        forced = (block == 0) | (block == last) | (block == last - 1)
        worth = jnp.where(forced, FORCED, worth)
        flat = (worth.shape[0], worth.shape[1] * self.kv_heads, count)
        seen = jnp.broadcast_to(block <= last, worth.shape)
        keys = selection.order_keys(worth.reshape(flat), seen.reshape(flat))
        return keys, *selection.thresholds(keys, self.blocks.top, jnp.int32(1), count)

    def _within(
        self, picked: tuple[jax.Array, jax.Array, jax.Array], index: jax.Array, columns: int
    ) -> jax.Array:
        """bool[R, S, G, n]: whether tokens i32[n] are in selected blocks."""
        keys, low, cut = picked
        block = jnp.minimum(index // self.blocks.select, keys.shape[-1] - 1)
        chosen = selection.chosen(keys[..., block], block, low, cut)
        return chosen.reshape(keys.shape[0], columns, self.kv_heads, -1)

    def _output(self, params: Params, states: dict[str, attend.State], x: jax.Array) -> jax.Array:
        gate = jax.nn.sigmoid(linear(x, params["gate"], jnp.float32))
        gate = gate.reshape(*x.shape[:-1], len(BRANCHES), self.heads)
        total = jnp.zeros((*x.shape[:-1], self.heads, self.dim), jnp.float32)
        for i, branch in enumerate(BRANCHES):
            out = attend.finish(states[branch]).reshape(total.shape)
            total = total + gate[..., i, :, None] * out
        return linear(total.astype(x.dtype).reshape(*x.shape[:-1], -1), params["o"])

    # -- forward, prefill, decode --------------------------------------------------------------

    def forward(
        self, params: Params, x: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `Mechanism.forward`. Nothing flows through the choice of blocks."""
        turn, tokens = call.tables[self.rope], x.shape[1]
        q, states = self._query(params, x, turn), {}
        contract = self.entries.contract
        raw = self._rows(params, x, "compress", None)
        index = jnp.arange(max(1, contract.count(tokens)), dtype=jnp.int32)
        at = index[:, None] * contract.stride + jnp.arange(contract.span, dtype=jnp.int32)
        blocks = raw[:, jnp.minimum(at, tokens - 1)]
        rows = self._compress(params, blocks, jnp.broadcast_to(index, (x.shape[0], index.size)))
        rows = self.entries.settled(rows)
        mask = index < self.entries.visible(call.positions)[..., None]
        form = self.entries.form
        states["compress"] = form.add(self._begin(q), q, rows, mask, self.scale)
        shares = self._shares(states["compress"], q, rows, mask)
        count = -(-tokens // self.blocks.select)
        picked = self._picked(jax.lax.stop_gradient(shares), call.positions, count)
        within = self._within(picked, jnp.arange(tokens, dtype=jnp.int32), tokens)
        causal = call.positions[:, None, :] <= call.positions[:, :, None]
        rows = self.tokens.settled(self._rows(params, x, "select", turn))
        mask = within & causal[:, :, None]
        states["select"] = form.add(self._begin(q), q, rows, mask, self.scale)
        rows = self._rows(params, x, "window", turn)
        states["window"] = self.window.forward(self._begin(q), q, rows, call.positions, self.scale)
        return self._output(params, states, x), {}

    def _write(self, params: Params, x: jax.Array, view: View, call: Call) -> View:
        """The blocks that close, the tail, and every token's row."""
        raw = self._rows(params, x, "compress", None)
        held = ring.read(view.leaves["tail"], view.layer)
        rows, first, done = closing(self.blocks, held, raw, call.start, call.count)
        index = first[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)
        view = self.entries.append(view, call, first, self._compress(params, rows, index), done)
        seen = ring.read(view.leaves["tail_pos"], view.layer)
        held = ring.advance(held, call.start, raw, call.count)
        seen = ring.advance(seen, call.start, call.positions, call.count)
        view = view.update(
            tail=ring.store(view.leaves["tail"], view.layer, held),
            tail_pos=ring.store(view.leaves["tail_pos"], view.layer, seen),
        )
        rows = self._rows(params, x, "select", call.tables[self.rope])
        return self.tokens.append(view, call, call.start, rows, call.count)

    def _tile(self, source: EntryPool, view: View, call: Call, t: jax.Array):
        """Index i32[n], cleaned rows [R, n, w] of tile t, and which each query sees [R, S, n]."""
        index = t * source.tile + jnp.arange(source.tile, dtype=jnp.int32)
        rows = pool.tile(view.leaves[source.name], view.layer, t, source.tile)
        rows = attend.clean(rows, index < source.visible(call.stop - 1)[:, None])
        return index, rows, index < source.visible(call.positions)[..., None]

    def prefill(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.prefill`. All tokens are scored, and those of other blocks masked."""
        turn, columns = call.tables[self.rope], x.shape[1]
        q, states, form = self._query(params, x, turn), {}, self.entries.form
        view = self._write(params, x, view, call)
        compress = self.entries.attend(self._begin(q), q, view, call, self.scale)
        size = self.entries.tile

        def share(t: jax.Array, out: jax.Array) -> jax.Array:
            _, rows, mask = self._tile(self.entries, view, call, t)
            part = self._shares(compress, q, rows, mask)
            return jax.lax.dynamic_update_slice_in_dim(out, part, t * size, axis=3)

        empty = jnp.zeros((*q.shape[:3], pool.rows(view.leaves[self.entries.name])), jnp.float32)
        shares = jax.lax.fori_loop(0, self.entries.tiles(call), share, empty)
        count = -(-pool.rows(view.leaves[self.tokens.name]) // self.blocks.select)
        picked = self._picked(shares, call.positions, count)

        def body(t: jax.Array, state: attend.State) -> attend.State:
            index, rows, mask = self._tile(self.tokens, view, call, t)
            mask = mask[:, :, None] & self._within(picked, index, columns)
            return form.add(state, q, rows, mask, self.scale)

        states["compress"] = compress
        states["select"] = jax.lax.fori_loop(0, self.tokens.tiles(call), body, self._begin(q))
        rows = self._rows(params, x, "window", turn)
        states["window"], view = self.window.prefill(
            self._begin(q), q, rows, view, call, self.scale
        )
        return self._output(params, states, x), view

    def decode(
        self, params: Params, x: jax.Array, view: View, call: Call
    ) -> tuple[jax.Array, View]:
        """See `Mechanism.decode`: a prefill of one token."""
        return self.prefill(params, x, view, call)


def build(fields: Fields) -> Nsa:
    """From a layer type's fields; its own: nsa_span, nsa_stride, nsa_select, nsa_top, nsa_hidden.

    Defaults are the paper's: blocks of 32 tokens every 16; 16 blocks of 64 are selected.
    """
    kind, dim, groups, dtype = fields.kind, fields.head_dim, fields.n_kv_heads, fields.cache_dtype
    blocks = Blocks(
        fields.get("nsa_span", 32),
        fields.get("nsa_stride", 16),
        fields.get("nsa_select", 64),
        fields.get("nsa_top", 16),
    )
    if fields.window < 1:
        raise ValueError(f"a {kind!r} layer needs window >= 1, got {fields.window}")
    width, form = 2 * groups * dim, attend.Form(groups)
    hidden = fields.get("nsa_hidden", 2 * dim)
    span = blocks.span
    return Nsa(
        kind,
        fields.d_model,
        fields.n_heads,
        groups,
        dim,
        fields.rope_of(fields.rope_theta),
        blocks,
        BlockCompressor(blocks, groups, dim, hidden, dtype),
        EntryPool(
            "entries",
            f"{kind} blocks",
            blocks.stride,
            width,
            dtype,
            TILE,
            form,
            span,
            fields.packing("entries", width, group=dim),
        ),
        EntryPool(
            "tokens",
            f"{kind} tokens",
            1,
            width,
            dtype,
            2 * TILE,
            form,
            packing=fields.packing("tokens", width, group=dim),
        ),
        WindowBranch(fields.window, width, dtype, form, fields.packing("window", width, group=dim)),
    )
