"""Live comparison of every family with the Hugging Face implementation, in every way to run it."""

import os

import numpy as np
import pytest

if os.environ.get("HETERO_KV_PARITY") != "1":  # `make parity` installs both: there they must import
    pytest.importorskip("torch")
    pytest.importorskip("transformers")

import jax
import torch
from transformers import AutoModelForCausalLM

from models import hf
from tests.models import families as model_families
from tests.parity import families, hf_family
from tests.parity.splits import run_split, splits_of

torch.set_num_threads(2)

ALL = [pytest.param(*case, id=f"{case[0]}-{case[1].name}") for case in families.cases()]


@pytest.mark.parametrize("model_type, case", ALL)
def test_family(model_type, case, tmp_path, record_property):
    fields = {**families.module(model_type).BASE, **case.hf}
    for bound in ("sliding_window", "index_topk"):  # far enough that both are left behind
        assert case.length > 2 * fields.get(bound, 0)
    torch_model, tokens = hf_family.build(model_type, case), families.tokens_of(model_type, case)
    want = hf_family.full_logits(torch_model, tokens)
    assert 2 < np.abs(want).max() < 60
    hf_family.save(torch_model, tmp_path)
    # Several chunks in every case; calls of two sizes (16 and 64) in the long ones.
    model, params = hf.from_pretrained(tmp_path, chunk=64 if case.length > 100 else 16)
    runs = {"forward": np.asarray(jax.jit(model.forward)(params, tokens))}
    for name, split in splits_of(case.length).items():
        runs[name] = run_split(model, params, tokens, split)
    errors = {name: float(np.abs(got - want).max()) for name, got in runs.items()}
    print(model_type, case.name, errors)
    record_property("max_error", max(errors.values()))
    tolerance = families.tolerance(model_type)
    assert max(errors.values()) <= tolerance, errors
    # The reference agrees with itself.
    split = [7, 1, 1, case.length - 9]
    cached = hf_family.cached_logits(torch_model, tokens, split)
    np.testing.assert_allclose(cached, want, atol=tolerance, rtol=0)


def test_no_family_is_tried_on_less_than_four_models():
    assert all(len(families.module(name).CASES) >= 4 for name in families.names())
    assert sorted(families.names()) == model_families.names()


@pytest.mark.parametrize("model_type", families.names())
def test_hugging_face_reads_what_we_write(model_type, tmp_path):
    case = families.module(model_type).CASES[1]
    torch_model, tokens = hf_family.build(model_type, case), families.tokens_of(model_type, case)
    hf_family.save(torch_model, tmp_path / "theirs")
    made = hf.from_pretrained(tmp_path / "theirs")
    hf.save_pretrained(*made, tmp_path / "ours", model_type)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    got, want = (hf_family.full_logits(x, tokens) for x in (again, torch_model))
    # The same weights; the library runs the experts of a loaded model in another order.
    np.testing.assert_allclose(got, want, atol=3e-5, rtol=0)
