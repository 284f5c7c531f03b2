"""What Hugging Face does not apply of a Gemma 3 configuration, and we do."""

import functools
import os

import numpy as np
import pytest

if os.environ.get("HETERO_KV_PARITY") != "1":
    pytest.importorskip("torch")
    pytest.importorskip("transformers")

from transformers.models.gemma3 import modeling_gemma3

from models import hf
from tests.parity import hf_family
from tests.parity.families import gemma3_text, tokens_of
from tests.parity.families_test import TOLERANCE
from tests.parity.family_case import FamilyCase
from tests.parity.splits import run_split

CASE = FamilyCase("caps", {**gemma3_text.TURNS, "attn_logit_softcapping": 1.5}, length=37)


def test_the_cap_of_attention_logits(tmp_path, monkeypatch):
    """The library's attention function has the argument, and its layer never hands it over."""
    torch_model = hf_family.build("gemma3_text", CASE)
    tokens = tokens_of("gemma3_text", CASE)
    uncapped = hf_family.full_logits(torch_model, tokens)
    for layer in torch_model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    np.testing.assert_array_equal(hf_family.full_logits(torch_model, tokens), uncapped)

    real = modeling_gemma3.eager_attention_forward
    capped = functools.partial(real, softcap=CASE.hf["attn_logit_softcapping"])
    monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", capped)
    want = hf_family.full_logits(torch_model, tokens)
    assert np.abs(want - uncapped).max() > 1e-2
    hf_family.save(torch_model, tmp_path)
    model, params = hf.from_pretrained(tmp_path, chunk=16)
    for split in ([37], [9, 11, *[-1] * 17]):
        got = run_split(model, params, tokens, split)
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
