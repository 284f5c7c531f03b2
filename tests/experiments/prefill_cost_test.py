"""What is timed is what a store can plan with."""

import jax
import pytest

import models
from experiments.prefill_cost import measure_prefill
from hetero_kv.prefix.costs import Costs


def test_it_can_be_planned_with():
    config = models.DecoderConfig(layer_types=("swa", "csa"), mlp_types=("dense",) * 2, window=8)
    model = models.build(config)
    params = model.init(jax.random.key(0))
    costs = Costs.measured(**measure_prefill(model, params, chunks=3, repeats=1))
    assert costs.prefill(0, 64) > 0 and costs.replay(64) > 0
    assert costs.prefill(64, 128) >= costs.prefill(0, 64)
    with pytest.raises(ValueError, match="two chunks"):
        measure_prefill(model, params, chunks=1)
