"""The library's decoding of Nemotron-H does not clip steps as its prefill does; ours does."""

import os

import numpy as np
import pytest

if os.environ.get("HETERO_KV_PARITY") != "1":
    pytest.importorskip("torch")
    pytest.importorskip("transformers")

from models import hf
from tests.parity import families, hf_family
from tests.parity.families import nemotron_h, tokens_of
from tests.parity.family_case import FamilyCase
from tests.parity.splits import run_split

CASE = FamilyCase(
    "clipped",
    {"layers_block_type": [nemotron_h.MAMBA, nemotron_h.FULL], "time_step_min": 0.5},
    length=37,
)


def test_steps_are_clipped_in_decoding_too(tmp_path):
    torch_model, tokens = hf_family.build("nemotron_h", CASE), tokens_of("nemotron_h", CASE)
    want = hf_family.full_logits(torch_model, tokens)
    chunks = hf_family.cached_logits(torch_model, tokens, [9, 11, 17])
    tolerance = families.tolerance("nemotron_h")
    np.testing.assert_allclose(chunks, want, atol=tolerance, rtol=0)
    one_by_one = hf_family.cached_logits(torch_model, tokens, [9, *[1] * 28])
    assert np.abs(one_by_one - want).max() > 1e-2
    hf_family.save(torch_model, tmp_path)
    model, params = hf.from_pretrained(tmp_path, chunk=16)
    for split in ([37], [9, *[-1] * 28]):
        got = run_split(model, params, tokens, split)
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=0)
