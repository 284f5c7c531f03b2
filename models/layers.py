"""From a DecoderConfig to layers: one attention mechanism, one feed-forward part, two norms."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hetero_kv.attention import registry
from hetero_kv.attention.call import Call, Mechanism, Train, View
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.norm import rms_norm
from hetero_kv.params import Params, ParamSpec, ParamTree
from models import prepared
from models.checks import FACTORS, check_layouts, check_names
from models.config import DecoderConfig
from models.hyper import Hyper
from models.mlp import Dense, MoE
from models.quantised import leaf

FeedForward = Dense | MoE
FORMS: dict[str, Callable[[Fields], FeedForward | None]] = {
    "dense": Dense.of,
    "moe": MoE.of,
    "hash_moe": functools.partial(MoE.of, hashed=True),
    "none": lambda fields: None,
}


@dataclasses.dataclass(frozen=True)
class Residual:
    """How a part's output y joins its input x: `kept x + taken y`. normed: x is normed."""

    normed: bool = False
    kept: float = 1.0
    taken: float = 1.0

    @classmethod
    def of(cls, config: DecoderConfig, own: Mapping[str, Any]) -> "Residual":
        """From the fields of a layer's or an MLP's type."""
        return cls(config.normed_residual, *(own.get(name, 1.0) for name in FACTORS))

    def __call__(self, x: jax.Array, normed: jax.Array, y: jax.Array) -> jax.Array:
        """x, its norm, and y, [R, S, d] each."""
        x = normed if self.normed else x
        x = x if self.kept == 1.0 else x * jnp.asarray(self.kept, x.dtype)
        return x + (y if self.taken == 1.0 else y * jnp.asarray(self.taken, y.dtype))


def _own(table: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """A type's own fields, without those of its residual."""
    return {name: x for name, x in table.get(kind, {}).items() if name not in FACTORS}


def attention(config: DecoderConfig, kind: str) -> Mechanism:
    """The mechanism of one layer type: a name in `config.attention`, or that of a mechanism."""
    own = _own(config.attention, kind)
    build = registry.find(own.pop("mechanism", kind))
    fields = Fields(config, kind, own)
    made = build(fields)
    fields.check_unused()
    check_layouts(kind, fields.get("cache_layouts") or {}, made.spec())
    where = f"attention[{kind!r}]: cache_layouts"
    check_names(own.get("cache_layouts") or {}, [made.spec()], where)
    return made


def feed_forward(config: DecoderConfig, kind: str) -> FeedForward | None:
    """The feed-forward part of one MLP type: a name in `config.mlps`, or that of a form."""
    own = _own(config.mlps, kind)
    form = own.pop("form", kind)
    if form not in FORMS:
        raise ValueError(f"unknown MLP type {form!r} in mlp_types; use one of {tuple(FORMS)}")
    fields = Fields(config, kind, own, "mlps")
    made = FORMS[form](fields)
    fields.check_unused()
    return made


def hyper(config: DecoderConfig) -> Hyper | None:
    """The residual streams, or None for a plain residual."""
    if not config.hc_streams:
        return None
    return Hyper(
        config.d_model, config.hc_streams, config.hc_sinkhorn_iters, config.hc_eps, config.norm_eps
    )


@dataclasses.dataclass(frozen=True)
class Layer:
    """Attention, then feed-forward, each between a norm and the residual (or its streams).

    mlp: None for a layer without one. sandwich: what a part gives is normed as well.
    """

    attention: Mechanism
    mlp: FeedForward | None
    hyper: Hyper | None
    d_model: int
    eps: float
    sandwich: bool = False
    residuals: tuple[Residual, Residual] = (Residual(), Residual())  # of attention, of the MLP

    def params(self) -> ParamTree:
        """Weights of one layer."""
        parts: dict = {"attn": self.attention}
        if self.mlp is not None:
            parts["mlp"] = self.mlp
        tree: dict = {}
        for name, part in parts.items():
            tree[f"{name}_norm"] = ParamSpec((self.d_model,), "ones", dtype="float32")
            tree[name] = part.params()
            if self.sandwich:
                tree[f"{name}_post_norm"] = tree[f"{name}_norm"]
            if self.hyper:
                tree[f"{name}_hc"] = self.hyper.params()
        return tree

    def prepare(self, params: Params, axis: int) -> Params:
        """See `Decoder.prepare`; `axis` is the first one of a weight as declared."""
        if isinstance(self.mlp, MoE):
            params = {**params, "mlp": self.mlp.apart(params["mlp"], axis)}
        return prepared.prepare(self.params(), params)

    def plain(self, params: Params, x: jax.Array) -> Params:
        """The weights as this layer reads them: in their places, none packed but experts'."""
        params = prepared.plain(self.params(), params)
        if not leaf.any_packed(params):
            return params
        experts = self.mlp.of_experts if isinstance(self.mlp, MoE) else ()
        held = {name: params["mlp"][name] for name in experts}
        own = dict(params)
        if held:
            own["mlp"] = {k: v for k, v in params["mlp"].items() if k not in held}
        own = leaf.plain(own, x)
        return {**own, "mlp": {**own["mlp"], **held}} if held else own

    def _block(self, params: Params, name: str, x: jax.Array, run):
        """One residual block around `run(normed input) -> (y, extra)`."""
        u, gates = x, None
        if self.hyper is not None:
            u, gates = self.hyper.read(params[f"{name}_hc"], x)
        normed = rms_norm(u, params[f"{name}_norm"], self.eps)
        y, extra = run(normed)
        if self.sandwich:
            y = rms_norm(y, params[f"{name}_post_norm"], self.eps)
        if gates is not None:
            return self.hyper.write(x, y, gates), extra
        return self.residuals[name == "mlp"](x, normed, y), extra

    def _mlp(self, params: Params, x: jax.Array, tokens: jax.Array, differentiable: bool):
        if self.mlp is None:
            return x

        def run(u: jax.Array) -> tuple[jax.Array, None]:
            return self.mlp(params["mlp"], u, tokens, differentiable), None

        return self._block(params, "mlp", x, run)[0]

    def forward(
        self, params: Params, x: jax.Array, tokens: jax.Array, call: Call, train: Train
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Without a cache, differentiable."""

        def run(u: jax.Array):
            return self.attention.forward(params["attn"], u, call, train)

        x, aux = self._block(params, "attn", x, run)
        return self._mlp(params, x, tokens, True), aux

    def step(
        self, params: Params, x: jax.Array, tokens: jax.Array, view: View, call: Call, decode: bool
    ) -> tuple[jax.Array, View]:
        """One prefill call, or one decode step."""
        attend = self.attention.decode if decode else self.attention.prefill

        def run(u: jax.Array):
            return attend(params["attn"], u, view, call)

        x, view = self._block(params, "attn", x, run)
        return self._mlp(params, x, tokens, False), view


def layer(config: DecoderConfig, attention_kind: str, mlp_kind: str) -> Layer:
    """One layer of the schedule."""
    return Layer(
        attention(config, attention_kind),
        feed_forward(config, mlp_kind),
        hyper(config),
        config.d_model,
        config.norm_eps,
        config.sandwich_norms,
        (
            Residual.of(config, config.attention.get(attention_kind, {})),
            Residual.of(config, config.mlps.get(mlp_kind, {})),
        ),
    )
