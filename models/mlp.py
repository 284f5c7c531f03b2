"""Feed-forward parts: a gated linear unit, and a mixture of experts of them (see `routing`)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from hetero_kv.attention.fields import Fields
from hetero_kv.linear import linear
from hetero_kv.params import Params, ParamSpec, ParamTree, matrix
from models.quantised import leaf
from models.routing import ROUTER, Router

UNROLL = 8  # expert calls up to which single rows are unrolled
DENSE = 16  # tokens up to which all experts run on all tokens: each weight is read just once
TILE = 32  # tokens of one expert in a tile of the sorted form
APART = (
    32  # experts up to which `MoE.apart` makes arrays of their own: compile time grows with them
)


def swish(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`gate sigmoid(1.702 gate) (up + 1)`, as in gpt-oss."""
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


GATES = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "swish": swish,
}


PLAIN = {"relu2": lambda up: jnp.square(jax.nn.relu(up))}  # without a gate


@dataclasses.dataclass(frozen=True)
class Unit:
    """A gated linear unit; gate is clipped above and up both ways at `limit`, 0: never.

    act: one of GATES, or of PLAIN: then there is no gate, and `gate_up` is up alone.
    """

    limit: float = 0.0
    act: str = "silu"

    def __post_init__(self):
        if self.act not in (*GATES, *PLAIN):
            raise ValueError(f"unknown activation {self.act!r}; use one of {(*GATES, *PLAIN)}")
        if self.act in PLAIN and self.limit:
            raise ValueError(f"{self.act!r} has no gate to clip: swiglu_limit must be 0")

    def columns(self, width: int) -> int:
        """Columns of `gate_up` for a unit of `width`."""
        return width if self.act in PLAIN else 2 * width

    def __call__(
        self,
        x: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
        gate_up_bias: jax.Array | None = None,
        down_bias: jax.Array | None = None,
    ) -> jax.Array:
        """x [..., d] with weights [d, columns(f)] and [f, d]."""
        both = linear(x, gate_up)
        if gate_up_bias is not None:
            both = both + gate_up_bias
        if self.act in PLAIN:
            inner = PLAIN[self.act](both)
        else:
            gate, up = jnp.split(both, 2, axis=-1)
            if self.limit:
                gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
            inner = GATES[self.act](gate, up)
        y = linear(inner, down)
        return y if down_bias is None else y + down_bias


@dataclasses.dataclass(frozen=True)
class Dense:
    """A linear unit of width d_ff."""

    d_model: int
    d_ff: int
    limit: float
    act: str = "silu"

    @classmethod
    def of(cls, fields: Fields) -> "Dense":
        """From an MLP type's fields; its own: activation."""
        act = fields.get("activation", "silu")
        return cls(fields.d_model, fields.d_ff, fields.swiglu_limit, act)

    def params(self) -> ParamTree:
        """gate_up: gate columns first, then up."""
        return {
            "gate_up": matrix(self.d_model, Unit(act=self.act).columns(self.d_ff)),
            "down": matrix(self.d_ff, self.d_model),
        }

    def __call__(
        self, params: Params, x: jax.Array, tokens: jax.Array, differentiable: bool
    ) -> jax.Array:
        """x [R, S, d] to [R, S, d]."""
        return Unit(self.limit, self.act)(x, params["gate_up"], params["down"])


@dataclasses.dataclass(frozen=True)
class MoE:
    """experts E of width d_ff, `picks` per token, shared experts as one of n_shared * d_ff."""

    d_model: int
    d_ff: int
    vocab: int
    experts: int
    picks: int
    n_shared: int
    scale: float
    limit: float
    hashed: bool
    router_scale: float
    router: Router = ROUTER
    act: str = "silu"
    bias: bool = False  # of the experts' two products
    shared_ff: int = 0  # width of the shared expert; 0: n_shared * d_ff
    shared_gate: bool = False  # the shared expert's output is times a sigmoid of its own

    def __post_init__(self):
        if not 1 <= self.picks <= self.experts:
            raise ValueError(
                f"experts_per_token={self.picks} must be in 1..n_experts={self.experts}"
            )
        self.router.check(self.experts, self.picks)

    @classmethod
    def of(cls, fields: Fields, hashed: bool = False) -> "MoE":
        """From an MLP type's fields; its own: activation, mlp_bias, shared_ff, shared_gate, and
        those of `Router.of`."""
        return cls(
            fields.d_model,
            fields.d_ff,
            fields.vocab_size,
            fields.n_experts,
            fields.experts_per_token,
            fields.n_shared_experts,
            fields.routed_scale,
            fields.swiglu_limit,
            hashed,
            fields.init_scale,
            Router.of(fields),
            fields.get("activation", "silu"),
            fields.get("mlp_bias", False),
            fields.get("shared_ff", 0),
            fields.get("shared_gate", False),
        )

    @property
    def unit(self) -> Unit:
        """What one expert computes."""
        return Unit(self.limit, self.act)

    def params(self) -> ParamTree:
        """Router, experts [E, d, 2f] and [E, f, d], the shared expert."""
        d, f, e = self.d_model, self.d_ff, self.experts
        tree: dict = {
            "router": ParamSpec((d, e), "normal", self.router_scale, product=True),
            "gate_up": matrix(e, d, self.unit.columns(f)),
            "down": matrix(e, f, d),
        }
        tree |= self.router.params(e)
        if self.hashed:
            tree.pop("bias", None)
            tree["table"] = ParamSpec((self.vocab, self.picks), "expert_table", e, "int32")
        if self.bias:
            tree["gate_up_bias"] = ParamSpec((e, self.unit.columns(f)), "zeros")
            tree["down_bias"] = ParamSpec((e, d), "zeros")
        if self.n_shared:
            wide = self.shared_ff or self.n_shared * f
            tree["shared"] = Dense(d, wide, self.limit, self.act).params()
            if self.shared_gate:
                tree["shared"] |= {"gate": matrix(d, 1)}
        return tree

    def apart(self, params: Params, axis: int = 0) -> Params:
        """The same weights, with every expert's in arrays of its own (tuples in place of an axis).

        XLA on the CPU copies what it slices before it multiplies, so an expert that is chosen out
        of one array is read, written and read again.
        """
        if self.experts > APART or isinstance(params["gate_up"], tuple):
            return params
        each = {
            name: tuple(_taken(params[name], e, axis) for e in range(self.experts))
            for name in self.of_experts
        }
        return {**params, **each}

    @property
    def of_experts(self) -> tuple[str, ...]:
        """Weights with an axis of experts, in the order that `Unit` takes them.

        They may be packed: an expert is dequantised when its turn comes.
        """
        names = ("gate_up", "down")
        return (*names, "gate_up_bias", "down_bias") if self.bias else names

    def route(self, params: Params, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Experts i32[n, k] and their weights f32[n, k] for x [n, d], tokens i32[n]."""
        logits = linear(x, params["router"], jnp.float32)
        chosen = params["table"][tokens] if self.hashed else None
        index, weights = self.router.pick(params, logits, self.picks, chosen)
        return index, weights * self.scale

    def __call__(
        self, params: Params, x: jax.Array, tokens: jax.Array, differentiable: bool
    ) -> jax.Array:
        """x [R, S, d], tokens i32[R, S] to [R, S, d]."""
        flat, ids = x.reshape(-1, self.d_model), tokens.reshape(-1)
        index, weights = self.route(params, flat, ids)
        n = flat.shape[0]
        if differentiable or (n <= DENSE and n * self.picks >= self.experts):
            y = self._all(params, flat, index, weights)
        elif n * self.picks <= max(UNROLL, self.experts):
            y = self._each(params, flat, index, weights)
        else:
            y = self._sorted(params, flat, index, weights)
        y = y.astype(x.dtype)
        if self.n_shared:
            shared = params["shared"]
            own = self.unit(flat, shared["gate_up"], shared["down"])
            if self.shared_gate:
                own = own * jax.nn.sigmoid(linear(flat, shared["gate"]))
            y = y + own
        return y.reshape(x.shape)

    def _expert(self, params: Params, x: jax.Array, expert: int | jax.Array) -> jax.Array:
        weights = [params[name] for name in self.of_experts]
        if isinstance(weights[0], tuple) and not isinstance(expert, int):
            each = [functools.partial(self._expert, params, expert=e) for e in range(self.experts)]
            return jax.lax.switch(expert, each, x)
        if isinstance(weights[0], tuple):
            own = [x[expert] for x in weights]
        else:
            own = [_chosen(x, expert) for x in weights]
        return self.unit(x, *leaf.plain(own, x)).astype(jnp.float32)

    def _all(self, params: Params, x: jax.Array, index: jax.Array, weights: jax.Array) -> jax.Array:
        """Every expert on every token."""
        experts = jnp.arange(self.experts)
        share = jnp.sum(jnp.where(index[..., None] == experts, weights[..., None], 0.0), axis=1)
        if isinstance(params["gate_up"], tuple):
            y = [self._expert(params, x, e) for e in range(self.experts)]
        else:
            each = jnp.broadcast_to(x, (self.experts, *x.shape))
            gate_up, down, *biases = leaf.plain([params[name] for name in self.of_experts], x)
            y = self.unit(each, gate_up, down, *(b[:, None] for b in biases)).astype(jnp.float32)
        total = share[:, 0, None] * y[0]
        for e in range(1, self.experts):
            total = total + share[:, e, None] * y[e]
        return total

    def _each(
        self, params: Params, x: jax.Array, index: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """One expert call per choice: for few tokens and many experts."""
        n, k = index.shape

        def one(i: int | jax.Array) -> jax.Array:
            row = jax.lax.dynamic_slice_in_dim(x, i // k, 1, axis=0)
            return weights[i // k, i % k] * self._expert(params, row, index[i // k, i % k])

        if n * k <= UNROLL:
            rows = [sum(one(t * k + j) for j in range(k)) for t in range(n)]
            return jnp.concatenate(rows, axis=0)

        def body(i: jax.Array, y: jax.Array) -> jax.Array:
            return y.at[i // k].add(one(i)[0])

        return jax.lax.fori_loop(0, n * k, body, jnp.zeros(x.shape, jnp.float32))

    def _sorted(
        self, params: Params, x: jax.Array, index: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Choices sorted into tiles of one expert each: work in proportion to the choices."""
        n, k = index.shape
        chosen = index.reshape(-1)
        order = jnp.argsort(chosen, stable=True)
        counts = jnp.sum(chosen[:, None] == jnp.arange(self.experts), axis=0)
        tiles_each = -(-counts // TILE)
        ends = jnp.cumsum(tiles_each)
        first_row = (ends - tiles_each) * TILE  # where an expert's rows begin, padded
        first_choice = jnp.cumsum(counts) - counts
        sorted_expert = chosen[order]
        rank = jnp.arange(n * k) - first_choice[sorted_expert]
        place = jnp.zeros(n * k, jnp.int32).at[order].set(first_row[sorted_expert] + rank)
        most = n * k // TILE + self.experts
        source = jnp.zeros(most * TILE, jnp.int32).at[place].set(jnp.arange(n * k) // k)
        rows = x[source]
        owner = jnp.searchsorted(ends, jnp.arange(most), side="right")

        def body(t: jax.Array, y: jax.Array, expert: int | None = None) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(rows, t * TILE, TILE, axis=0)
            done = self._expert(params, part, owner[t] if expert is None else expert)
            return jax.lax.dynamic_update_slice_in_dim(y, done, t * TILE, axis=0)

        y = jnp.zeros((most * TILE, x.shape[1]), jnp.float32)
        if isinstance(params["gate_up"], tuple):
            for e in range(self.experts):
                mine = functools.partial(body, expert=e)
                y = jax.lax.fori_loop(ends[e] - tiles_each[e], ends[e], mine, y)
        else:
            y = jax.lax.fori_loop(0, ends[-1], body, y)
        picked = y[place.reshape(n, k)]
        total = weights[:, 0, None] * picked[:, 0]
        for j in range(1, k):
            total = total + weights[:, j, None] * picked[:, j]
        return total


def _taken(weight: jax.Array | leaf.Packed, expert: int, axis: int) -> jax.Array | leaf.Packed:
    """A copy of one expert's part of a weight."""
    return jax.tree.map(lambda x: jnp.take(x, expert, axis), weight)


def _chosen(weight: jax.Array | leaf.Packed, expert: int | jax.Array) -> jax.Array | leaf.Packed:
    """One expert's part of a weight whose first axis is of experts."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, expert, 0, keepdims=False), weight
    )
