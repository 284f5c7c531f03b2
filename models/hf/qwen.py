"""What Qwen3-Next and Qwen3.5 share: gated DeltaNet, and gated full attention every fourth layer.

A kind says how its files hold the projections of a linear layer, and what its MLPs are. Heads of
further tokens (`mtp`) are left out.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from models.config import DecoderConfig
from models.hf import fields as json_fields
from models.hf import rope
from models.hf.family import Family
from models.hf.parts import Layout, feed_forward, listed

TYPES = {"linear_attention": "gated_delta", "full_attention": "full"}
THETA = 10_000.0
PARTIAL = "partial_rotary_factor"
# How positions of pictures are mixed: of a text's token all three positions are the same.
MIXED = ("mrope_section", "mrope_interleaved")
PLAIN = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
}
EXPERTS = {
    "moe_intermediate_size": "d_ff",
    "num_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
}
LINEAR = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "conv_width",
}
FIXED = {"hidden_act": "silu"}
SHARED = "shared_expert_intermediate_size"
# Fields of every configuration of these families.
OURS = {
    "qk_norm": True,
    "sinks": False,
    "n_shared_experts": 1,
    "routed_scale": 1.0,
    **json_fields.PLAIN_BLOCK,
    "swiglu_limit": 0.0,
}
GATED = {"rope_first": True, "attn_gate": True}
ROUTED = {"router_score": "softmax", "router_choice_bias": False, "shared_gate": True}

LAYER = {
    "attn_norm": ("input_layernorm.weight", "plus_one"),
    "mlp_norm": ("post_attention_layernorm.weight", "plus_one"),
    **{f"attn/{x}": (f"self_attn.{x}_proj.weight", "swap") for x in "qkvo"},
    **{f"attn/{x}_bias": (f"self_attn.{x}_proj.bias", "same") for x in "qkvo"},
    **{f"attn/{x}_norm": (f"self_attn.{x}_norm.weight", "plus_one") for x in "qk"},
    "mlp/router": ("mlp.gate.weight", "swap"),
    "mlp/shared/gate": ("mlp.shared_expert_gate.weight", "swap"),
}
DELTA = {
    **{name: LAYER[name] for name in LAYER if not name.startswith("attn/")},
    "attn/conv": ("linear_attn.conv1d.weight", "taps"),
    "attn/dt_bias": ("linear_attn.dt_bias", "same"),
    "attn/a_log": ("linear_attn.A_log", "same"),
    "attn/norm": ("linear_attn.norm.weight", "same"),
    "attn/o": ("linear_attn.out_proj.weight", "swap"),
}
PROJECTIONS = ("attn/qkvz", "attn/ba")
TOP = {
    "embed": ("model.embed_tokens.weight", "same"),
    "norm": ("model.norm.weight", "plus_one"),
    "head": ("lm_head.weight", "swap"),
}

Mlps = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """One `model_type`.

    plain: fields of a `config.json` beside PLAIN that are ours by another name.
    projections: `(layer type's fields, prefix, path, shape, *index)` to the tensors that hold one
        of PROJECTIONS.
    parse_mlps: `(fields)` to MLP types and what is declared of them.
    write_mlps: `(config)` back to fields.
    known_mlps: what `write_mlps` has a place for, by MLP type: fields that it needs, and values.
    """

    title: str
    model_type: str
    architecture: str
    plain: Mapping[str, str]
    projections: Callable[..., Layout]
    parse_mlps: Callable[[Mapping[str, Any]], tuple[tuple[str, ...], Mlps]]
    write_mlps: Callable[[DecoderConfig], dict[str, Any]]
    known_mlps: Mapping[str, tuple[set[str], Mapping[str, Any]]]
    by_key_head: bool  # the order of columns, see `attention.gated_delta`
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=lambda: FIXED)

    def family(self) -> Family:
        """Its converter."""

        def left_out(config: DecoderConfig, name: str) -> bool:
            return name.startswith("mtp.")

        return Family(self.parse, self.write, self.layouts, left_out=left_out)

    def layouts(
        self, config: DecoderConfig, path: str, shape: tuple[int, ...], layer: int | None, *index
    ) -> Iterator[Layout]:
        """See `Family`."""
        if layer is None:
            yield listed(TOP, "", path, shape)
            return
        prefix, kind = f"model.layers.{layer}.", config.layer_types[layer]
        if path in PROJECTIONS:
            yield self.projections(config.attention[kind], prefix, path, shape, *index)
        elif path.rpartition("/")[2] in ("gate_up", "down"):
            yield from feed_forward(prefix, path, shape, *index, shared="shared_expert")
        else:
            yield listed(DELTA if kind == "gated_delta" else LAYER, prefix, path, shape, *index)

    def parse(self, fields: Mapping[str, Any]) -> DecoderConfig:
        """The configuration of a `config.json`; ValueError for what is not understood."""
        plain = PLAIN | self.plain
        json_fields.need(fields, [*plain, "num_hidden_layers"])
        json_fields.fixed(fields, self.fixed)
        count, every = fields["num_hidden_layers"], fields.get("full_attention_interval", 4)
        default = [list(TYPES)[(i + 1) % every == 0] for i in range(count)]
        layer_types = json_fields.schedule(fields, TYPES, default)
        given = dict(fields.get("rope_parameters") or {"rope_theta": fields.get("rope_theta")})
        partial = given.pop(PARTIAL, None) or fields.get(PARTIAL) or 0.25
        turned = int(fields["head_dim"] * partial)
        given = {name: x for name, x in given.items() if name not in MIXED}
        attention: dict[str, dict[str, Any]] = {}
        if "gated_delta" in layer_types:
            json_fields.need(fields, LINEAR)
            linear = {ours: fields[theirs] for theirs, ours in LINEAR.items()}
            attention["gated_delta"] = {
                "mechanism": "gated_delta",
                "by_key_head": self.by_key_head,
                **linear,
            }
        if "full" in layer_types:
            attention["full"] = {
                "mechanism": "full",
                "rope": rope.rope(given, THETA) | {"halves": True, "dim": turned},
                "attn_bias": fields.get("attention_bias", False),
                **GATED,
            }
        mlp_types, mlps = self.parse_mlps(fields)
        return DecoderConfig(
            **{ours: fields[theirs] for theirs, ours in plain.items()},
            **json_fields.dtypes(fields),
            **OURS,
            layer_types=layer_types,
            mlp_types=mlp_types,
            attention=attention,
            mlps=json_fields.used(mlps, mlp_types),
            rope_dim=turned,
            norm_eps=fields.get("rms_norm_eps", 1e-6),
            tie_embeddings=fields.get("tie_word_embeddings", False),
        )

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Fields of a `config.json`; ValueError where the family has no place for the model."""
        theirs = {ours: name for name, ours in TYPES.items()}
        attention = copy.deepcopy(config.attention)
        json_fields.refuse(self._wrong(config), self.title)
        written: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "dtype": config.param_dtype,
            "num_hidden_layers": len(config.layer_types),
            "layer_types": [theirs[kind] for kind in config.layer_types],
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "rope_parameters": {"rope_type": "default", PARTIAL: config.rope_dim / config.head_dim},
            **{name: getattr(config, ours) for name, ours in (PLAIN | self.plain).items()},
            **self.write_mlps(config),
            **self.fixed,
        }
        if linear := attention.get("gated_delta"):
            written |= {name: linear[ours] for name, ours in LINEAR.items()}
        if full := attention.get("full"):
            written["rope_parameters"] |= rope.parameters(full["rope"])
            written["attention_bias"] = full.get("attn_bias", False)
        return written

    def _wrong(self, config: DecoderConfig) -> dict[str, Any]:
        """Fields that the family has no place for."""
        wrong = json_fields.unlike(config, OURS)
        known = {"layer_types": set(TYPES.values()), "mlp_types": set(self.known_mlps)}
        wrong |= {k: getattr(config, k) for k, v in known.items() if set(getattr(config, k)) - v}
        needed = {"full": {"rope", *GATED}, "gated_delta": set(LINEAR.values())}
        for kind in {*config.layer_types} & set(needed):
            if not needed[kind].issubset(config.attention.get(kind, {})):
                wrong["attention"] = config.attention
        linear = config.attention.get("gated_delta", {})
        if linear and linear.get("by_key_head", True) != self.by_key_head:
            wrong["attention"] = config.attention
        for kind in {*config.mlp_types} & set(self.known_mlps):
            own, (names, values) = config.mlps.get(kind, {}), self.known_mlps[kind]
            if not names.issubset(own) or any(own.get(k) != v for k, v in values.items()):
                wrong["mlps"] = config.mlps
        return wrong


def routed(fields: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Experts beside a gated shared one."""
    json_fields.need(fields, [SHARED])
    return {**ROUTED, **own, "shared_ff": fields[SHARED]}
