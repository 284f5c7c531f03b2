"""The configuration of a hybrid decoder: every part can be changed or switched off.

Layer types beyond the built-in ones are declared in `attention` and `mlps`: names with fields of
their own, which come before those of the whole model. What is declared is the type of some layer.
The `build` of a mechanism's module tells which fields it reads, and which it must be given.
"""

import dataclasses
from typing import Any

from hetero_kv.attention.rope import Yarn


@dataclasses.dataclass(kw_only=True)
class DecoderConfig:
    """A hybrid decoder. The defaults are of the DeepSeek-V4 class; other families are configs too.

    Fields are flat and mutable so that `--config.model.window=0` works; `models.build` freezes
    what it needs. A zero usually switches a part off (see the comments).
    """

    vocab_size: int = 256
    d_model: int = 64
    layer_types: tuple[str, ...] = ("swa", "csa")  # mechanisms, or names in `attention`
    mlp_types: tuple[str, ...] = ("dense", "dense")  # dense, moe, hash_moe, or a name in `mlps`
    # By layer type: {"mechanism": its name or dotted path, and fields of that type alone}.
    attention: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    # By MLP type: {"form": dense, moe, hash_moe or none, and fields of that type alone}.
    mlps: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    # Attention, common part.
    n_heads: int = 2
    head_dim: int = 32
    rope_dim: int = 16  # rotated channels: the last ones of a head
    q_lora_rank: int = 0  # 0: direct query projection
    o_groups: int = 0  # 0: direct output projection; else grouped low rank
    o_lora_rank: int = 0
    sinks: bool = True  # a learned logit per head in the denominator
    window: int = 16  # tokens, the current one included; 0: no window branch
    n_kv_heads: int = 2  # grouped-query layers ("full", "local") only
    qk_norm: bool = True  # grouped-query layers only

    # Compressed branches, and the indexer ("csa", "mla"). Ratios are tokens per entry.
    csa_ratio: int = 4
    hca_ratio: int = 128
    csa_overlap: bool = True  # an entry pools the previous group as well
    indexer: bool = True  # False: every visible entry is attended
    index_heads: int = 8
    index_dim: int = 16
    index_topk: int = 8  # entries ("mla": tokens); -1: all visible ones

    # Positions.
    rope_theta: float = 10_000.0  # "swa" and "full" layers
    compress_rope_theta: float = 160_000.0  # everything in "csa" and "hca" layers
    yarn_factor: float = 0.0  # 0: no YaRN on the compress frequencies
    yarn_original_max: int = 65_536
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0

    # Feed-forward part.
    d_ff: int = 128  # width of the dense MLP, and of one expert
    n_experts: int = 4
    experts_per_token: int = 2
    n_shared_experts: int = 1  # shared width = n_shared_experts * d_ff
    routed_scale: float = 1.5
    swiglu_limit: float = 0.0  # 0: no clamp

    # Residual streams.
    hc_streams: int = 0  # 0: plain residual; n >= 1: hyper-connections with n streams
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    sandwich_norms: bool = False  # norms behind attention and MLP too, before the residual
    # A layer adds what a part gives to that part's normed input (MiniMax-01). Fields
    # residual_factor and output_factor of a layer's or an MLP's type scale the two.
    normed_residual: bool = False
    embed_scale: float = 1.0  # factor of embeddings
    final_softcap: float = 0.0  # logits become cap * tanh(logits / cap); 0: they stay
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    init_scale: float = 0.02  # standard deviation of embeddings and routers at init

    # Numerics and cache geometry.
    param_dtype: str = "float32"
    dtype: str = "float32"  # activations
    cache_dtype: str = "float32"  # windows, entries, index keys; raw compressor rows are float32
    # By leaf ("entries", "index_keys", "window", "kv", "latent", …): rows stored as "fp8_rope",
    # "fp8_f32", "fp4" or "int8" (`hetero_kv.packing`) and read in cache_dtype. Attention sees what
    # is read, in training too. Leaves that are not named are stored as they are.
    cache_layouts: dict[str, str | None] = dataclasses.field(default_factory=dict)
    # Bytes that packed rows are a multiple of; 0: each layout's own, as published. Kernels read
    # them where they are 128: TPUs and GPUs copy whole lanes (zeros fill the rest of a row).
    cache_align: int = 0
    # Implementation of the decode step's ops: "auto" takes kernels on TPU only (README, Kernels).
    # Training runs a kernel only where one is named; prefill is as "auto" always.
    kernels: str = "auto"  # or "reference", "pallas_tpu", "pallas_gpu", "interpret"
    chunk: int = 64  # tokens per prefill call, on the absolute grid
    block: int = 0  # tokens per prefix block; 0: lcm of all strides, raised to >= 16
    scan_layers: bool = True  # stack and scan repeating layers

    @property
    def yarn(self) -> Yarn | None:
        """The YaRN settings of the compress frequencies, or None."""
        if not self.yarn_factor:
            return None
        return Yarn(
            self.yarn_factor,
            self.yarn_original_max,
            self.yarn_beta_fast,
            self.yarn_beta_slow,
        )

    def replace(self, **changes) -> "DecoderConfig":
        """A copy with the named fields changed."""
        return dataclasses.replace(self, **changes)
