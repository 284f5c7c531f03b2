"""The three arms run the same steps."""

import jax

import models
from experiments.paging_cost import ARMS, measure_paging


def test_every_arm_is_timed():
    config = models.DecoderConfig(layer_types=("csa",), mlp_types=("dense",), window=8)
    model = models.build(config)
    params = model.init(jax.random.key(0))
    times = measure_paging(
        model, params, rows=2, length=20, capacity=64, steps=2, repeats=2, seconds=60
    )
    assert set(times) == set(ARMS)
    assert all(len(x) == 2 and min(x) > 0 for x in times.values())
