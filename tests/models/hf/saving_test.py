"""Saving: what would be read as another model is refused."""

import dataclasses
import json

import pytest

from models import build, hf
from tests.models import families


@pytest.mark.parametrize("golden", families.goldens())
def test_a_field_that_the_family_loses_is_refused(golden: str, tmp_path) -> None:
    """A family that writes too little: without the check, another model would be read."""
    name = golden.partition("-")[0]
    family, (model, _) = hf.family(name), families.load(golden)
    params = model.abstract_params()
    assert family.fields(model, params)["model_type"] == name

    def forgetful(config):
        return family.write(config) | {"rms_norm_eps": 0.125, "layer_norm_epsilon": 0.125}

    broken = dataclasses.replace(family, write=forgetful)
    with pytest.raises(ValueError, match=r"norm_eps=.* would be read as 0\.125"):
        broken.fields(model, params)


def test_fields_that_change_nothing_may_be_lost() -> None:
    """The number of key heads means nothing to DeepSeek-V4."""
    model, _ = hf.from_pretrained(families.GOLDENS / "smallest")
    other = build(model.config.replace(n_kv_heads=7, chunk=32, kernels="reference"))
    family = hf.family("deepseek_v4")
    fields = family.fields(other, other.abstract_params())
    assert json.loads(json.dumps(fields)) == json.loads(
        json.dumps(family.fields(model, model.abstract_params()))
    )
