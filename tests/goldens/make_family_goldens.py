"""Writes the goldens of all families but DeepSeek-V4. Needs torch: `python -m` from the root.

Directories are called `<model_type>-<case>`, and hold what `make_goldens` says. Names of families
as arguments: only those.
"""

import dataclasses
import itertools
import json
import pathlib
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.parity import families, hf_family
from tests.parity.family_case import FamilyCase

HERE = pathlib.Path(__file__).parent
AGREE = 3e-5  # of a run in pieces with the run in one: no choice hangs on rounding


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """The model with every floating tensor rounded to bfloat16, still computing in float32."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.bfloat16())
    return model


def clear_model(
    model_type: str, case: FamilyCase
) -> tuple[PreTrainedModel, np.ndarray, np.ndarray]:
    """Model, tokens and logits of the first seed without a near-tie."""
    for seed in itertools.count(case.seed):
        seeded = dataclasses.replace(case, seed=seed)
        model = rounded(hf_family.build(model_type, seeded))
        tokens = families.tokens_of(model_type, seeded)
        logits = hf_family.full_logits(model, tokens)
        pieces = hf_family.cached_logits(model, tokens, [5] * (case.length // 5))
        if np.abs(pieces - logits[:, : pieces.shape[1]]).max() < AGREE:
            print(f"{model_type}-{case.name}: seed {seed}")
            return model, tokens, logits
    raise AssertionError("unreachable")


def write(model_type: str, case: FamilyCase) -> None:
    """One golden."""
    directory = HERE / f"{model_type}-{case.name}"
    directory.mkdir(exist_ok=True)
    model, tokens, logits = clear_model(model_type, case)
    model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
    model.config.save_pretrained(directory)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    tied = tied if model.config.tie_word_embeddings else set()
    half = {
        name: (t.bfloat16() if t.is_floating_point() else t).contiguous().clone()
        for name, t in model.state_dict().items()
        if name not in tied
    }
    save_file(half, directory / "model.safetensors", metadata={"format": "pt"})
    np.savez(directory / "golden.npz", tokens=tokens, logits=logits)
    fields = json.loads((directory / "config.json").read_text())
    assert fields["model_type"] == model_type
    again = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    np.testing.assert_allclose(
        hf_family.full_logits(again.eval(), tokens), logits, atol=1e-5, rtol=0
    )


def main() -> None:
    """Write all, or those of the named families."""
    torch.set_num_threads(2)
    for model_type in sys.argv[1:] or families.names():
        made = families.module(model_type)
        for case in made.CASES:
            if case.name in made.GOLDENS:
                write(model_type, case)


if __name__ == "__main__":
    main()
