"""From a DecoderConfig to layers: one attention mechanism, one feed-forward part, two norms."""

import dataclasses

import jax

from hetero_kv.attention.call import Call, Mechanism, Train, View
from hetero_kv.attention.csa import csa
from hetero_kv.attention.entries import TILE, EntryPool
from hetero_kv.attention.full import Full
from hetero_kv.attention.hca import hca
from hetero_kv.attention.latent_heads import LatentHeads
from hetero_kv.attention.norm import rms_norm
from hetero_kv.attention.rope import Rope
from hetero_kv.attention.sliding import Sliding
from hetero_kv.attention.window import WindowBranch
from hetero_kv.params import Params, ParamSpec, ParamTree
from models.config import ATTENTION_KINDS, MLP_KINDS, DecoderConfig
from models.hyper import Hyper
from models.mlp import Dense, MoE


def attention(config: DecoderConfig, kind: str) -> Mechanism:
    """The mechanism of one layer kind."""
    if kind not in ATTENTION_KINDS:
        raise ValueError(
            f"unknown layer type {kind!r} in layer_types; use one of {ATTENTION_KINDS}"
        )
    if kind == "full":
        rope = Rope(config.rope_dim, config.rope_theta)
        width = 2 * config.n_kv_heads * config.head_dim
        return Full(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
            rope,
            config.qk_norm,
            config.sinks,
            config.norm_eps,
            EntryPool("kv", "full kv", 1, width, config.cache_dtype, 2 * TILE),
        )
    if kind == "swa":
        rope = Rope(config.rope_dim, config.rope_theta)
        if config.window < 1:
            raise ValueError("a 'swa' layer needs window >= 1; window=0 suits csa and hca only")
    else:
        rope = Rope(config.rope_dim, config.compress_rope_theta, config.yarn)
    heads = LatentHeads(
        config.d_model,
        config.n_heads,
        config.head_dim,
        rope,
        config.q_lora_rank,
        config.o_groups,
        config.o_lora_rank,
        config.sinks,
        config.norm_eps,
        config.cache_dtype,
        own_rows=config.window > 0,
        kernels=config.kernels,
    )
    window = None
    if config.window > 0:
        window = WindowBranch(config.window, config.head_dim, config.cache_dtype)
    if kind == "swa":
        return Sliding(heads, window)
    if kind == "hca":
        return hca(heads, window, ratio=config.hca_ratio)
    return csa(
        heads,
        window,
        ratio=config.csa_ratio,
        overlap=config.csa_overlap,
        index_heads=config.index_heads,
        index_dim=config.index_dim,
        topk=config.index_topk if config.indexer else -1,
    )


def feed_forward(config: DecoderConfig, kind: str) -> Dense | MoE:
    """The feed-forward part of one layer kind."""
    if kind not in MLP_KINDS:
        raise ValueError(f"unknown MLP type {kind!r} in mlp_types; use one of {MLP_KINDS}")
    if kind == "dense":
        return Dense(config.d_model, config.d_ff, config.swiglu_limit)
    return MoE(
        config.d_model,
        config.d_ff,
        config.vocab_size,
        config.n_experts,
        config.experts_per_token,
        config.n_shared_experts,
        config.routed_scale,
        config.swiglu_limit,
        kind == "hash_moe",
        config.init_scale,
    )


def hyper(config: DecoderConfig) -> Hyper | None:
    """The residual streams, or None for a plain residual."""
    if not config.hc_streams:
        return None
    return Hyper(
        config.d_model, config.hc_streams, config.hc_sinkhorn_iters, config.hc_eps, config.norm_eps
    )


@dataclasses.dataclass(frozen=True)
class Layer:
    """Attention, then feed-forward, each between a norm and the residual (or its streams)."""

    attention: Mechanism
    mlp: Dense | MoE
    hyper: Hyper | None
    d_model: int
    eps: float

    def params(self) -> ParamTree:
        """Weights of one layer."""
        tree = {
            "attn_norm": ParamSpec((self.d_model,), "ones", dtype="float32"),
            "attn": self.attention.params(),
            "mlp_norm": ParamSpec((self.d_model,), "ones", dtype="float32"),
            "mlp": self.mlp.params(),
        }
        if self.hyper:
            tree |= {"attn_hc": self.hyper.params(), "mlp_hc": self.hyper.params()}
        return tree

    def prepare(self, params: Params, axis: int) -> Params:
        """See `Decoder.prepare`; `axis` is the first one of a weight as declared."""
        if not isinstance(self.mlp, MoE):
            return params
        return {**params, "mlp": self.mlp.apart(params["mlp"], axis)}

    def _block(self, params: Params, name: str, x: jax.Array, run):
        """One residual block around `run(normed input) -> (y, extra)`."""
        norm = params[f"{name}_norm"]
        if self.hyper is None:
            y, extra = run(rms_norm(x, norm, self.eps))
            return x + y, extra
        u, gates = self.hyper.read(params[f"{name}_hc"], x)
        y, extra = run(rms_norm(u, norm, self.eps))
        return self.hyper.write(x, y, gates), extra

    def _mlp(self, params: Params, x: jax.Array, tokens: jax.Array, differentiable: bool):
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
    )
