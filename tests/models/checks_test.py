"""Bad configs and inputs are refused with the value and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from hetero_kv.attention import registry


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_heads", 0),
        ("n_heads", 2.5),
        ("d_model", 0),
        ("window", "8"),
        ("vocab_size", 0),
        ("norm_eps", -1.0),
        ("yarn_factor", -2.0),
        ("cache_dtype", "int8"),
        ("dtype", "bfloat"),
        ("dtype", "bfloat16"),  # its weights are float32
        ("cache_align", -128),
        ("cache_align", 1 << 20),
    ],
)
def test_a_senseless_field_is_named(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        models.build(models.DecoderConfig(**{field: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layer_types="swa"), "layer_types='swa': a tuple of names"),
        (dict(layer_types=("swa", 3)), r"layer_types has \[3\]"),
        (dict(mlp_types=None), "mlp_types=None: a tuple of names"),
        (dict(attention=[("swa", {})]), "attention=.*: a dict by the names in layer_types"),
        (dict(attention={"swa": 8}), r"attention\['swa'\]=8: a dict of its fields"),
        (dict(mlps={"dense": "wide"}), r"mlps\['dense'\]='wide': a dict of its fields"),
        (dict(attention={"local": {"window": 8}}), r"attention declares \['local'\].*layer_types"),
        (dict(mlps={"moe": {}, "hash_moe": {}}), r"mlps declares \['hash_moe', 'moe'\]"),
        (dict(attention={"swa": {"mechanism": 3}}), r"attention\['swa'\]: mechanism=3: a string"),
        (dict(mlps={"dense": {"form": ["moe"]}}), r"mlps\['dense'\]: form=\['moe'\]: a string"),
        (dict(attention={"swa": {"window": "8"}}), r"attention\['swa'\]: window='8'"),
        (dict(attention={"swa": {"n_heads": 0}}), r"attention\['swa'\]: n_heads=0: .* >= 1"),
        (dict(attention={"swa": {"sinks": 1}}), r"attention\['swa'\]: sinks=1: True or False"),
        (dict(attention={"swa": {"norm_eps": "0"}}), r"norm_eps='0': a number"),
        (dict(attention={"swa": {"widow": 8}}), r"\['widow'\]; it may have .*'window'"),
        (dict(mlps={"dense": {"widht": 8}}), r"mlps\['dense'\] .*\['widht'\]; .*'d_ff'"),
        (dict(mlps={"dense": {"activation": 2}}), r"mlps\['dense'\]: activation=2: a string"),
        (dict(attention={"swa": {"output_factor": "2"}}), "output_factor='2': a number"),
        (dict(attention={"swa": {"rope": 1e4}}), r"attention\['swa'\]: rope=10000.0: a dict of"),
        (
            dict(attention={"swa": {"rope": {"base": 1e4}}}),
            r"rope has fields \['base'\]; .*'theta'",
        ),
        (dict(attention={"swa": {"rope": {"yarn": {"factor": 2.0}}}}), "yarn lacks original_max"),
    ],
)
def test_types_of_layers_are_declared_in_full_and_not_in_vain(changes: dict, message: str):
    config = models.DecoderConfig(layer_types=("swa",), mlp_types=("dense",))
    with pytest.raises(ValueError, match=message):
        models.build(config.replace(**changes))


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("mla", ("kv_lora_rank", "nope_dim", "v_dim")),
        ("kda", ("linear_heads", "linear_dim")),
        ("gated_delta", ("key_heads", "value_heads", "key_dim", "value_dim")),
        ("mamba2", ("ssm_heads", "ssm_dim", "ssm_states")),
    ],
)
def test_what_a_mechanism_needs_is_told_and_documented(kind: str, needed: tuple[str, ...]):
    config = models.DecoderConfig(layer_types=(kind,), mlp_types=("dense",), sinks=False)
    some = {needed[0]: 2}
    for own, lacking in ({}, needed), (some, needed[1:]):
        with pytest.raises(ValueError, match=f"lacks {', '.join(lacking)}; .*{', '.join(needed)}"):
            models.build(config.replace(attention={kind: own} if own else {}))
    for wrong in (0, 2.0, True, "2"):
        own = dict.fromkeys(needed, 2) | {needed[-1]: wrong}
        with pytest.raises(ValueError, match=rf"attention\['{kind}'\]: {needed[-1]}={wrong!r}"):
            models.build(config.replace(attention={kind: own}))
    models.build(config.replace(attention={kind: dict.fromkeys(needed, 2)}))
    documented = registry.find(kind).__doc__
    assert all(name in documented for name in needed)


@pytest.mark.parametrize("off", [{"indexer": False}, {"index_topk": -1}])
@pytest.mark.parametrize(
    ("kind", "own"), [("csa", {}), ("mla", {"kv_lora_rank": 8, "nope_dim": 8, "v_dim": 8})]
)
def test_a_field_that_another_one_switches_off_is_told_with_it(kind: str, own: dict, off: dict):
    config = models.DecoderConfig(layer_types=(kind,), mlp_types=("dense",))
    models.build(config.replace(attention={kind: own | off}))
    with pytest.raises(ValueError, match=r"index_dim=32 is read only where .*set indexer=True"):
        models.build(config.replace(attention={kind: own | off | {"index_dim": 32}}))


@pytest.fixture(scope="module")
def small() -> tuple[models.Decoder, dict]:
    model = models.build(models.DecoderConfig(layer_types=("swa",), mlp_types=("dense",)))
    return model, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.abstract_params())


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([[256]]), "0..255"),
        (np.array([[-1]]), "0..255"),
        (np.array([[0.7]]), "integers"),
        (np.array([1]), "shape"),
        (np.zeros((1, 0), int), "shape"),
    ],
)
def test_bad_tokens_are_refused(small, tokens, message):
    model, params = small
    cache = model.init_cache(batch=1, capacity=8)
    with pytest.raises(ValueError, match=message):
        model.forward(params, tokens)
    with pytest.raises(ValueError, match=message):
        model.prefill(params, tokens, cache)


def test_steps_refuse_wrong_shapes_and_full_caches(small):
    model, params = small
    cache = model.init_cache(batch=1, capacity=8)
    for token in (np.zeros((1, 1), int), np.int32(0), np.zeros(2, int)):
        with pytest.raises(ValueError, match="shape"):
            model.decode_step(params, token, cache)
    with pytest.raises(ValueError, match="would not fit"):
        model.decode_many(params, np.zeros(1, np.int32), cache, 9)
    tokens, _ = model.decode_many(params, np.zeros(1, np.int32), cache, 8)
    assert tokens.shape == (1, 8)
