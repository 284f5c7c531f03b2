"""Writes the goldens beside this file. Needs torch and transformers: `python -m` from the root.

Each directory is a tiny Hugging Face model (`config.json`, `model.safetensors`) and a `golden.npz`
with tokens i32[B, T] and the logits f32[B, T, V] that the library computes in float32. Weights are
rounded to bfloat16 first, so that they can be stored so. `legacy` holds the tensors and logits of
`ratios_4_128` again, with the tensor names and configuration fields of the released checkpoints.
"""

import dataclasses
import itertools
import json
import pathlib

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import DeepseekV4ForCausalLM

from tests.oracle import decoder, from_hf
from tests.parity import cases, hf_tiny

HERE = pathlib.Path(__file__).parent
SMALLEST_GAP = 2e-4  # of index scores and of router scores: no comparison hangs on rounding

SMALL = {**cases.SMALL, "vocab_size": 48}
GOLDENS = (
    cases.Case("smallest", cases.SMALLEST, length=27),
    cases.Case("ratios_4_8", {}, batch=2, length=61),
    cases.Case(
        "ratios_3_7",
        {**SMALL, **cases.ratios(3, 7), "sliding_window": 2, "hc_mult": 1},
        batch=2,
        length=50,
    ),
    cases.Case(
        "ratios_4_128",
        {**SMALL, **cases.YARN, **cases.ratios(4, 128), "sliding_window": 128, "swiglu_limit": 1.0},
        length=275,
    ),
    cases.Case("flash", {**SMALL, **cases.FLASH, "hidden_size": 12}, length=61),
)

# Checkpoint names by state-dict name, without the prefixes `model.` and `layers.i.`; the packed
# experts are taken apart below.
TOP_NAMES = {
    "lm_head.weight": "head.weight",
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
}


def rounded(model: DeepseekV4ForCausalLM) -> DeepseekV4ForCausalLM:
    """The model with every floating tensor rounded to bfloat16, still computing in float32."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.bfloat16())
    return model


def is_clear(model: DeepseekV4ForCausalLM, tokens: np.ndarray, logits: np.ndarray) -> bool:
    """Whether no choice of entries or experts is close; the reference must agree as well."""
    config = from_hf.config_of(model.config.to_dict())
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for row, expected in zip(tokens, logits, strict=True):
        ours, trace = decoder.forward(config, weights, row)
        gaps = [t.router_gap.min() for t in trace.layers] + [trace.smallest_gap().min()]
        if min(gaps) < SMALLEST_GAP:
            return False
        np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
    return True


def clear_model(case: cases.Case) -> tuple[DeepseekV4ForCausalLM, np.ndarray, np.ndarray]:
    """Model, tokens and logits of the first seed without near-ties."""
    for seed in itertools.count(case.seed):
        seeded = dataclasses.replace(case, seed=seed)
        model, tokens = rounded(hf_tiny.build(seeded)), hf_tiny.tokens_of(seeded)
        logits = hf_tiny.full_logits(model, tokens)
        if is_clear(model, tokens, logits):
            print(f"{case.name}: seed {seed}, {sum(p.numel() for p in model.parameters())} weights")
            return model, tokens, logits
    raise AssertionError("unreachable")


def stored(tensors: dict[str, torch.Tensor], directory: pathlib.Path) -> None:
    """Write tensors, the floating ones as bfloat16."""
    half = {
        name: (t.bfloat16() if t.is_floating_point() else t).contiguous().clone()
        for name, t in tensors.items()
    }
    save_file(half, directory / "model.safetensors", metadata={"format": "pt"})


def legacy_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict under checkpoint names, and one tensor of a further-token head."""
    out = {"mtp.0.norm.weight": torch.ones(1)}
    for name, tensor in state.items():
        if name in TOP_NAMES:
            out[TOP_NAMES[name]] = tensor
            continue
        _, _, layer, leaf = name.split(".", 3)
        if leaf == "mlp.experts.gate_up_proj":
            for e, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                out[f"layers.{layer}.ffn.experts.{e}.w1.weight"] = gate
                out[f"layers.{layer}.ffn.experts.{e}.w3.weight"] = up
        elif leaf == "mlp.experts.down_proj":
            for e, expert in enumerate(tensor):
                out[f"layers.{layer}.ffn.experts.{e}.w2.weight"] = expert
        else:
            out[f"layers.{layer}.{LAYER_NAMES[leaf]}"] = tensor
    return out


def legacy_config(fields: dict) -> dict:
    """A `config.json` with the released checkpoints' fields for schedules, ratios and positions."""
    ratio = {cases.SLIDING: 0, cases.SPARSE: 4, cases.HEAVY: 128}
    modern = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters")
    out = {k: v for k, v in fields.items() if k not in (*modern, "partial_rotary_factor")}
    compress = fields["rope_parameters"]["compress"]
    keys = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    return out | {
        # The last 0 is the further-token head's.
        "compress_ratios": [ratio[kind] for kind in fields["layer_types"]] + [0],
        "num_hash_layers": fields["mlp_layer_types"].count("hash_moe"),
        "qk_rope_head_dim": int(fields["head_dim"] * fields["partial_rotary_factor"]),
        "rope_scaling": {"type": "yarn"} | {k: compress[k] for k in keys},
    }


def check(directory: pathlib.Path, tokens: np.ndarray, logits: np.ndarray) -> None:
    """The library must read the directory back and compute the same."""
    model = DeepseekV4ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    again = hf_tiny.full_logits(model.eval(), tokens)
    np.testing.assert_allclose(again, logits, atol=1e-5, rtol=0)


def main() -> None:
    """Write all goldens."""
    torch.set_num_threads(2)
    for case in GOLDENS:
        directory = HERE / case.name
        directory.mkdir(exist_ok=True)
        model, tokens, logits = clear_model(case)
        model.config.architectures, model.config.dtype = ["DeepseekV4ForCausalLM"], "float32"
        model.config.save_pretrained(directory)
        fields = json.loads((directory / "config.json").read_text())
        stored(model.state_dict(), directory)
        np.savez(directory / "golden.npz", tokens=tokens, logits=logits)
        check(directory, tokens, logits)
        if case.name == "ratios_4_128":
            legacy = HERE / "legacy"
            legacy.mkdir(exist_ok=True)
            text = json.dumps(legacy_config(fields), indent=2, sort_keys=True)
            (legacy / "config.json").write_text(text + "\n")
            stored(legacy_tensors(model.state_dict()), legacy)
            np.savez(legacy / "golden.npz", tokens=tokens, logits=logits)
            check(legacy, tokens, logits)


if __name__ == "__main__":
    main()
