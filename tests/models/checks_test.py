"""Bad configs and inputs are refused with the value and the remedy."""

import dataclasses

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


NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
FLOATS = [x.name for x in dataclasses.fields(models.DecoderConfig) if type(x.default) is float]
MAY_BE_ZERO = ("yarn_factor", "swiglu_limit", "final_softcap", "init_scale")


@pytest.mark.parametrize("name", FLOATS)
def test_every_float_field_is_finite_and_in_range(name: str):
    """Of the whole model, and of one layer type or MLP type."""
    wrong = (*NOT_FINITE, -1.0, *(() if name in MAY_BE_ZERO else (0.0,)))
    for value in wrong:
        with pytest.raises(ValueError, match=name):
            models.build(models.DecoderConfig(**{name: value}))
        if name.startswith("yarn"):
            continue
        for table in (dict(attention={"swa": {name: value}}), dict(mlps={"dense": {name: value}})):
            where = next(iter(table))
            with pytest.raises(ValueError, match=rf"{where}\['\w+'\]: {name}="):
                models.build(models.DecoderConfig(**table))
    if name in MAY_BE_ZERO:
        models.build(models.DecoderConfig(**{name: 0.0}))


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("full", {"attn_scale": 0.0}),
        ("full", {"attn_scale": float("inf")}),
        ("full", {"attn_softcap": float("nan")}),
        ("full", {"attn_softcap": -1.0}),
        ("mla", {"latent_eps": 0.0}),
        ("mamba2", {"ssm_dt_min": -0.1}),
        ("swa", {"output_factor": float("nan")}),
        ("swa", {"residual_factor": float("inf")}),
        ("swa", {"rope": {"theta": 0.0}}),
        ("swa", {"rope": {"theta": float("nan")}}),
        ("swa", {"rope": {"theta": "1e4"}}),
        ("swa", {"rope": {"stretch": float("inf")}}),
        ("csa", {"index_topk": -7}),
        ("csa", {"compress_rope_theta": 0.0}),
        ("swa", {"cache_dtype": "int8"}),
        ("mla", {"kernels": "cuda"}),
    ],
)
def test_fields_of_one_layer_type_are_in_range(kind: str, own: dict):
    some = {"mla": dict.fromkeys(("kv_lora_rank", "nope_dim", "v_dim"), 8)}
    some["mamba2"] = dict.fromkeys(("ssm_heads", "ssm_dim", "ssm_states"), 2)
    attention = {"x": {"mechanism": kind, **some.get(kind, {}), **own}}
    config = models.DecoderConfig(layer_types=("x",), mlp_types=("dense",), attention=attention)
    name = next(iter(own["rope"])) if "rope" in own else next(iter(own))
    with pytest.raises(ValueError, match=rf"attention\['x'\]: .*{name}"):
        models.build(config)


YARN = dict(factor=4.0, original_max=32, beta_fast=2.0, beta_slow=0.25)


@pytest.mark.parametrize(
    "changes",
    [
        *(dict(factor=x) for x in (0.5, -1.0, *NOT_FINITE)),
        dict(original_max=0),
        dict(original_max=1.5),
        dict(beta_fast=0.25, beta_slow=2.0),
        dict(beta_slow=0.0),
        dict(beta_fast=float("inf")),
    ],
)
def test_yarn_that_makes_no_frequencies_is_refused(changes: dict):
    """Of the whole model, where 0 as the factor means none, and of one layer type."""
    (name, *_), yarn = changes, YARN | changes
    with pytest.raises(ValueError, match=f"yarn_{name}"):
        models.build(models.DecoderConfig(**{f"yarn_{k}": v for k, v in yarn.items()}))
    config = models.DecoderConfig(layer_types=("swa",), mlp_types=("dense",))
    for own, fits in ((YARN, True), (yarn, False)):
        typed = config.replace(attention={"swa": {"rope": {"yarn": own}}})
        if fits:
            models.build(typed)
            continue
        with pytest.raises(ValueError, match=rf"attention\['swa'\]: rope.*{name}"):
            models.build(typed)


@pytest.mark.parametrize("name", ["d_model", "vocab_size"])
@pytest.mark.parametrize("table", ["attention", "mlps"])
def test_a_size_of_the_whole_model_is_no_field_of_one_type(table: str, name: str):
    kind = {"attention": "swa", "mlps": "dense"}[table]
    with pytest.raises(ValueError, match=rf"{table}\['{kind}'\]: {name}=32, .*whole model"):
        models.build(models.DecoderConfig(**{table: {kind: {name: 32}}}))


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
