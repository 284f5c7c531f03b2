"""Random tiny models of any family of the Hugging Face implementation. Needs torch."""

import pathlib
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from tests.parity import families
from tests.parity.family_case import FamilyCase


def build(model_type: str, case: FamilyCase) -> PreTrainedModel:
    """A random float32 model; everything that Hugging Face initialises to a constant is random."""
    torch.manual_seed(case.seed)
    fields = {**families.module(model_type).BASE, **case.hf}
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        # A wrong sink, bias or norm path would pass with zeros and ones.
        for name, param in model.named_parameters():
            if "norm" in name and not name.endswith("bias"):
                param.add_(0.2 * torch.randn_like(param))
            elif name.endswith(("bias", "sinks")):
                param.normal_(0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    return model.float().eval()


def save(model: PreTrainedModel, directory: str | pathlib.Path) -> None:
    """Write a Hugging Face directory."""
    model.save_pretrained(str(directory))
    (pathlib.Path(directory) / "generation_config.json").unlink(missing_ok=True)


@torch.no_grad()
def full_logits(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Logits f32[B, T, V] of one call without a cache."""
    return model(torch.from_numpy(tokens).long(), use_cache=False).logits.float().numpy()


@torch.no_grad()
def cached_logits(model: PreTrainedModel, tokens: np.ndarray, splits: Sequence[int]) -> np.ndarray:
    """Logits f32[B, T, V] of consecutive calls of `splits` tokens on one cache."""
    cache, out, start = DynamicCache(config=model.config), [], 0
    for size in splits:
        chunk = torch.from_numpy(tokens[:, start : start + size]).long()
        out.append(model(chunk, cache=cache, use_cache=True).logits.float().numpy())
        start += size
    return np.concatenate(out, axis=1)
