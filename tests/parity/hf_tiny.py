"""Random tiny models of the Hugging Face implementation, and ways to run them. Needs torch."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.cache_utils import DynamicCache

from tests.parity.cases import BASE, Case


def build(case: Case) -> DeepseekV4ForCausalLM:
    """A random float32 model; everything that Hugging Face initialises to a constant is random."""
    torch.manual_seed(case.seed)
    config = DeepseekV4Config(**{**BASE, **case.hf})
    model = DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        # A wrong sink, bias or norm path would pass with zeros and ones.
        for name, param in model.named_parameters():
            if name.endswith(("position_bias", "sinks")):
                param.normal_(0, 0.5)
            elif name.endswith(("base", "scale")):
                param.add_(0.3 * torch.randn_like(param))
            elif "norm" in name:
                param.add_(0.2 * torch.randn_like(param))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
            elif name.endswith("tid2eid"):
                experts = [torch.randperm(config.n_routed_experts) for _ in range(len(buffer))]
                buffer.copy_(torch.stack(experts)[:, : config.num_experts_per_tok])
    return model


def tokens_of(case: Case) -> np.ndarray:
    """The case's random tokens, i32[B, T]."""
    vocab = {**BASE, **case.hf}["vocab_size"]
    rng = np.random.default_rng(case.seed)
    return rng.integers(0, vocab, (case.batch, case.length), dtype=np.int32)


def save(
    model: DeepseekV4ForCausalLM, directory: str | pathlib.Path, library_names: bool = True
) -> None:
    """Write a Hugging Face directory.

    With `library_names` tensors are called as in the state dict. Without, the library renames them
    on the way out: leaves as in the released checkpoint, `model.` prefix kept, experts unpacked.
    """
    model.save_pretrained(str(directory), save_original_format=not library_names)
    (pathlib.Path(directory) / "generation_config.json").unlink(missing_ok=True)


@torch.no_grad()
def full_logits(model: DeepseekV4ForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Logits f32[B, T, V] of one call without a cache."""
    return model(torch.from_numpy(tokens).long(), use_cache=False).logits.float().numpy()


@torch.no_grad()
def cached_logits(
    model: DeepseekV4ForCausalLM, tokens: np.ndarray, splits: Sequence[int]
) -> np.ndarray:
    """Logits f32[B, T, V] of consecutive calls of `splits` tokens on one cache."""
    cache = DynamicCache(config=model.config)  # without the config, compressing layers fail
    out, start = [], 0
    for size in splits:
        chunk = torch.from_numpy(tokens[:, start : start + size]).long()
        out.append(model(chunk, cache=cache, use_cache=True).logits.float().numpy())
        start += size
    return np.concatenate(out, axis=1)


def sparse_layers(model: DeepseekV4ForCausalLM) -> dict[int, torch.nn.Module]:
    """The indexers by layer."""
    return {
        i: layer.self_attn.compressor.indexer
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer.self_attn.compressor, "indexer")
    }


def index_scores(
    model: DeepseekV4ForCausalLM, tokens: np.ndarray
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Logits of one call, and the index scores f32[B, T, n] of each sparse layer in that call."""
    seen: dict[int, np.ndarray] = {}
    with contextlib.ExitStack() as stack:
        for i, indexer in sparse_layers(model).items():

            def keep(module, args, out, layer=i):
                seen[layer] = out.detach().numpy().copy()

            stack.callback(indexer.scorer.register_forward_hook(keep).remove)
        logits = full_logits(model, tokens)
    return logits, seen


@contextlib.contextmanager
def forced_selection(
    model: DeepseekV4ForCausalLM, selections: Mapping[int, np.ndarray]
) -> Iterator[None]:
    """Inside, each sparse layer attends to given entries instead of its indexer's top-k.

    Args:
        model: the model to patch; restored on exit.
        selections: by layer, bool[B, T, n]. Queries are taken by position, so any split works.
    """
    patched = []
    for layer, indexer in sparse_layers(model).items():
        if layer not in selections:
            continue
        original, chosen = indexer.forward, torch.from_numpy(np.asarray(selections[layer], bool))

        def forward(
            hidden, latent, position_ids, cache, layer_idx, original=original, chosen=chosen
        ):
            original(hidden, latent, position_ids, cache, layer_idx)  # still writes its cache
            rows = chosen[:, position_ids[0]]
            index = torch.arange(rows.shape[-1]).expand(rows.shape)
            return torch.where(rows, index, -1)  # -1 marks a slot as not selected

        indexer.forward = forward
        patched.append((indexer, original))
    try:
        yield
    finally:
        for indexer, original in patched:
            indexer.forward = original
