"""Random tiny models of any family of the Hugging Face implementation. Needs torch."""

import pathlib
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

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
            elif name.endswith("A_log"):  # so that some heads remember the whole batch
                param.normal_(-2.0, 1.0)
            elif name.endswith(".D"):
                param.normal_(1, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    return model.float().eval()


def save(model: PreTrainedModel, directory: str | pathlib.Path) -> None:
    """Write a Hugging Face directory."""
    model.save_pretrained(str(directory))
    (pathlib.Path(directory) / "generation_config.json").unlink(missing_ok=True)


class CountedCache(MiniMaxCache):
    """A `MiniMaxCache` that knows its length where the first layer is linear.

    The library asks layer 0, which then holds no keys, and takes the past to be empty: see
    `tests/parity/minimax_test.py`.
    """

    def __init__(self, counting: int):
        super().__init__()
        self.counting = counting

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(self.counting)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, self.counting)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache of the model's kind."""
    if model.config.model_type == "minimax":
        return CountedCache(model.config.layer_types.index("full_attention"))
    return DynamicCache(config=model.config)


@torch.no_grad()
def full_logits(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Logits f32[B, T, V] of one call without a cache."""
    return model(torch.from_numpy(tokens).long(), use_cache=False).logits.float().numpy()


@torch.no_grad()
def cached_logits(model: PreTrainedModel, tokens: np.ndarray, splits: Sequence[int]) -> np.ndarray:
    """Logits f32[B, T, V] of consecutive calls of `splits` tokens on one cache."""
    cache, out, start = new_cache(model), [], 0
    for size in splits:
        chunk = torch.from_numpy(tokens[:, start : start + size]).long()
        out.append(model(chunk, cache=cache, use_cache=True).logits.float().numpy())
        start += size
    return np.concatenate(out, axis=1)
