"""The model's decode step with kernels: it lowers for accelerators, and decodes the same tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from hetero_kv.pages.layout import Paging
from models import geometries
from models.config import DecoderConfig
from tests.hetero_kv.kernels import strict

CONFIG = DecoderConfig(
    layer_types=("swa", "csa", "hca", "csa", "hca"),
    mlp_types=("dense",) * 5,
    d_model=64,
    n_heads=2,
    head_dim=64,
    window=16,
    hca_ratio=16,
    index_heads=8,
    index_dim=64,
    index_topk=8,
    param_dtype="bfloat16",
    dtype="bfloat16",
    cache_dtype="bfloat16",
)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize(
    ("kernels", "platform"), [("auto", "tpu"), ("pallas_tpu", "tpu"), ("pallas_gpu", "cuda")]
)
def test_the_whole_step_lowers_with_kernels(kernels: str, platform: str, paged: bool) -> None:
    model = models.build(CONFIG.replace(kernels=kernels))
    cache = model.abstract_cache(2, 512)
    if paged:
        # Pages of 128 tokens: 8 entries of a ratio of 16, which a GPU copies as one group.
        paging = Paging.of(model.cache_spec, 2, 512, span=128)
        cache = jax.eval_shape(lambda: model.init_paged_cache(2, 512, paging))
    arguments = (model.abstract_params(), jax.ShapeDtypeStruct((2,), jnp.int32), cache)

    def step(*arguments):
        return model.stack.step(*arguments, None)

    # Attention of five layers and two indexers: scanned layers share theirs.
    assert strict.kernels_in(strict.lowered(step, platform, *arguments), platform) >= 4
    if kernels == "auto":
        assert "tpu_custom_call" not in strict.lowered(step, "cpu", *arguments)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kernels", "platform"), [("pallas_tpu", "tpu"), ("pallas_gpu", "cuda")], ids=["tpu", "cuda"]
)
@pytest.mark.parametrize("made", [geometries.v4_flash, geometries.v4_pro])
def test_the_whole_step_lowers_at_published_sizes(made, kernels: str, platform: str) -> None:
    model = models.build(made().replace(kernels=kernels))
    paging = Paging.of(model.cache_spec, 4, 1 << 20, span=1024)
    cache = jax.eval_shape(lambda: model.init_paged_cache(4, 1 << 20, paging))
    arguments = (model.abstract_params(), jax.ShapeDtypeStruct((4,), jnp.int32), cache)
    text = strict.lowered(lambda *x: model.stack.step(*x, None), platform, *arguments)
    assert strict.kernels_in(text, platform) >= 3


@pytest.mark.full
@pytest.mark.parametrize("name", ["v4_flash", "v4_pro"])
def test_the_whole_step_of_packed_rows_lowers_for_gpus(name: str) -> None:
    """As they are served, in rows that kernels copy: windows, entries and index keys packed."""
    config = geometries.deployed(name).replace(kernels="pallas_gpu", cache_align=128)
    model = models.build(config)
    paging = Paging.of(model.cache_spec, 4, 1 << 20, span=1024)
    cache = jax.eval_shape(lambda: model.init_paged_cache(4, 1 << 20, paging))
    arguments = (model.abstract_params(), jax.ShapeDtypeStruct((4,), jnp.int32), cache)
    text = strict.lowered(lambda *x: model.stack.step(*x, None), "cuda", *arguments)
    assert strict.kernels_in(text, "cuda") >= 3


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="kernels='fast'"):
        models.build(CONFIG.replace(kernels="fast"))


@pytest.mark.full
def test_an_interpreted_step_is_that_of_the_reference() -> None:
    config = CONFIG.replace(
        layer_types=("csa", "hca"),
        mlp_types=("dense",) * 2,
        d_model=16,
        head_dim=16,
        index_dim=16,
        d_ff=16,
        vocab_size=16,
        param_dtype="float32",
        dtype="float32",
        cache_dtype="float32",
        chunk=64,
    )
    model = models.build(config)
    params = model.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 65))
    cache = model.init_cache(1, 64 * 4, poison=True)
    _, cache = model.prefill(params, tokens[:, :64], cache, logits="none")
    step = functools.partial(
        models.build(config.replace(kernels="interpret")).stack.step, active=None
    )
    got, after = strict.tpu(jax.jit(step), params, tokens[:, 64], cache)
    want, expected = model.decode_step(params, tokens[:, 64], cache)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(after.length, expected.length)
