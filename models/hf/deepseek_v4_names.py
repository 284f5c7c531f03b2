"""Which tensor of a DeepSeek-V4 checkpoint is which weight of ours, and how it is laid out.

Three spellings of names are read: the library's state dict (`model.layers.0.self_attn.…`), the
released checkpoints' (`layers.0.attn.…`), and what `save_pretrained` of the library writes by
default, which is the second with the prefix and some top names of the first. The first is written.
"""

from collections.abc import Iterator

from models.config import DecoderConfig
from models.hf.parts import Layout, gated, listed, part

# Weight below a layer: state-dict name below `model.layers.i.`, and its form. "same", "swap" (file
# [out, in], ours [in, out]) or "groups" (file [G * out, in], ours [G, in, out]). The last rows are
# variants that the family does not have; their names follow its pattern.
LAYER = {
    "attn_norm": ("input_layernorm.weight", "same"),
    "mlp_norm": ("post_attention_layernorm.weight", "same"),
    "attn_hc/fn": ("attn_hc.fn", "swap"),
    "attn_hc/base": ("attn_hc.base", "same"),
    "attn_hc/scale": ("attn_hc.scale", "same"),
    "mlp_hc/fn": ("ffn_hc.fn", "swap"),
    "mlp_hc/base": ("ffn_hc.base", "same"),
    "mlp_hc/scale": ("ffn_hc.scale", "same"),
    "attn/q_a": ("self_attn.q_a_proj.weight", "swap"),
    "attn/q_a_norm": ("self_attn.q_a_norm.weight", "same"),
    "attn/q_b": ("self_attn.q_b_proj.weight", "swap"),
    "attn/kv": ("self_attn.kv_proj.weight", "swap"),
    "attn/kv_norm": ("self_attn.kv_norm.weight", "same"),
    "attn/o_a": ("self_attn.o_a_proj.weight", "groups"),
    "attn/o_b": ("self_attn.o_b_proj.weight", "swap"),
    "attn/sinks": ("self_attn.sinks", "same"),
    "attn/compressor/kv": ("self_attn.compressor.kv_proj.weight", "swap"),
    "attn/compressor/gate": ("self_attn.compressor.gate_proj.weight", "swap"),
    "attn/compressor/position_bias": ("self_attn.compressor.position_bias", "same"),
    "attn/compressor/norm": ("self_attn.compressor.kv_norm.weight", "same"),
    "attn/indexer/q": ("self_attn.compressor.indexer.q_b_proj.weight", "swap"),
    "attn/indexer/weights": ("self_attn.compressor.indexer.scorer.weights_proj.weight", "swap"),
    "attn/indexer/compressor/kv": ("self_attn.compressor.indexer.kv_proj.weight", "swap"),
    "attn/indexer/compressor/gate": ("self_attn.compressor.indexer.gate_proj.weight", "swap"),
    "attn/indexer/compressor/position_bias": (
        "self_attn.compressor.indexer.position_bias",
        "same",
    ),
    "attn/indexer/compressor/norm": ("self_attn.compressor.indexer.kv_norm.weight", "same"),
    "mlp/router": ("mlp.gate.weight", "swap"),
    "mlp/bias": ("mlp.gate.e_score_correction_bias", "same"),
    "mlp/table": ("mlp.gate.tid2eid", "same"),
    "attn/q": ("self_attn.q_proj.weight", "swap"),
    "attn/k": ("self_attn.k_proj.weight", "swap"),
    "attn/v": ("self_attn.v_proj.weight", "swap"),
    "attn/o": ("self_attn.o_proj.weight", "swap"),
    "attn/q_norm": ("self_attn.q_norm.weight", "same"),
    "attn/k_norm": ("self_attn.k_norm.weight", "same"),
}
TOP = {
    "embed": ("model.embed_tokens.weight", "same"),
    "norm": ("model.norm.weight", "same"),
    "head": ("lm_head.weight", "swap"),
    "head_hc/fn": ("model.hc_head.hc_fn", "swap"),
    "head_hc/base": ("model.hc_head.hc_base", "same"),
    "head_hc/scale": ("model.hc_head.hc_scale", "same"),
}

# Released checkpoints' names, below `layers.i.` and at the top.
CHECKPOINT_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.norm.weight": "self_attn.kv_norm.weight",  # so called by the library's save_pretrained
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}
CHECKPOINT_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}


def canonical(name: str) -> str:
    """The state-dict name of a tensor in any of the three spellings.

    Experts that are stored one by one become `….mlp.experts.e.w1.weight`; a name that fits nothing
    is returned as it is.
    """
    short = name.removeprefix("model.")
    if short in CHECKPOINT_TOP:
        return CHECKPOINT_TOP[short]
    parts = short.split(".", 2)
    if parts[0] != "layers" or len(parts) < 3:
        return name
    leaf = CHECKPOINT_LAYER.get(parts[2], parts[2])
    if leaf.startswith("ffn.experts."):
        leaf = leaf.replace("ffn.", "mlp.", 1)
    return f"model.layers.{parts[1]}.{leaf}"


def layouts(
    config: DecoderConfig, path: str, shape: tuple[int, ...], layer: int | None, *index: int
) -> Iterator[Layout]:
    """The ways in which files hold one weight; the first is the one that is written.

    Args:
        config: of the model.
        path: of the weight below its layer, or at the top.
        shape: of the weight in one layer.
        layer: its number, None at the top.
        index: of the layer in the stacked leaf.
    """
    if layer is None:
        yield listed(TOP, "", path, shape)
        return
    prefix = f"model.layers.{layer}."
    if path in LAYER:
        yield listed(LAYER, prefix, path, shape, *index)
        return
    where, _, leaf = path.rpartition("/")
    if where not in ("mlp", "mlp/shared") or leaf not in ("gate_up", "down"):
        raise ValueError(f"no tensor name is known for the weight {path} of layer {layer}")
    if len(shape) == 3:
        name = f"{prefix}mlp.experts."
        yield (part(f"{name}{leaf}_proj", "swap", shape, *index),)
        yield tuple(
            piece
            for e in range(config.n_experts)
            for piece in gated(f"{name}{e}.", ("w1", "w3", "w2"), leaf, shape[1:], *index, e)
        )
    else:
        name = prefix + ("mlp." if where == "mlp" else "mlp.shared_experts.")
        names = ("gate_proj", "up_proj", "down_proj")
        yield tuple(gated(name, names, leaf, shape, *index))
