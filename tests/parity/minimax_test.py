"""What the library's cache of MiniMax-01 does where the first layer is linear, as released."""

import os

import numpy as np
import pytest

if os.environ.get("HETERO_KV_PARITY") != "1":
    pytest.importorskip("torch")
    pytest.importorskip("transformers")

import torch
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from tests.parity import families, hf_family
from tests.parity.families import minimax, tokens_of
from tests.parity.family_case import FamilyCase

CASE = FamilyCase("linear_first", minimax.TURNS, length=24)


@torch.no_grad()
def after(model, cache: MiniMaxCache, tokens: torch.Tensor, first: int, then: int) -> np.ndarray:
    """Logits of `then` tokens behind a call of `first`."""
    model(tokens[:, :first], cache=cache, use_cache=True)
    return model(tokens[:, first : first + then], cache=cache, use_cache=True).logits.numpy()


def test_its_length_is_asked_of_the_first_layer():
    """It takes the past to be empty: decoding rotates by wrong positions, a chunk's mask is short.

    `hf_family.CountedCache` asks the first softmax layer, and all is well.
    """
    model, tokens = hf_family.build("minimax", CASE), tokens_of("minimax", CASE)
    want = hf_family.full_logits(model, tokens)
    ids = torch.from_numpy(tokens).long()
    wrong = after(model, MiniMaxCache(), ids, 20, 1)
    assert np.abs(wrong - want[:, 20:21]).max() > 1e-2
    with pytest.raises(RuntimeError, match="size of tensor"):
        after(model, MiniMaxCache(), ids, 20, 4)
    for then in (1, 4):
        right = after(model, hf_family.new_cache(model), ids, 20, then)
        tolerance = families.tolerance("minimax")
        np.testing.assert_allclose(right, want[:, 20 : 20 + then], atol=tolerance, rtol=0)
