"""Identity and keys: everything that matters changes them, nothing else does."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import types

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from hetero_kv.contract import CacheSpec, Segment
from hetero_kv.kernels import regime as kernel_regime
from hetero_kv.kernels import tuning as kernel_tuning
from hetero_kv.prefix import identity as identity_module
from hetero_kv.prefix.encoding import digest, encode
from hetero_kv.prefix.identity import (
    NUMERIC_FIELDS,
    Identity,
    config_digest,
    describe_leaves,
    weights_digest,
)
from hetero_kv.prefix.keys import block_keys
from tests.hetero_kv import synthetic

ROOT = pathlib.Path(__file__).resolve().parents[3]
SHA_A, SHA_B = "a" * 64, "b" * 64


def identity(**changes):
    fields = dict(
        weights=SHA_A,
        config=SHA_A,
        leaves=describe_leaves(synthetic.everything()),
        block=8,
        chunk=16,
        batch=2,
        tiles=(("csa entries", 4),),
        backend="cpu",
        device_kind="cpu",
        precision="matmul=None x64=False",
        jax_version="0",
    )
    return Identity(**{**fields, **changes})


CHANGES = dict(
    weights=SHA_B,
    config=SHA_B,
    leaves=describe_leaves(synthetic.everything())[:-1],
    block=16,
    adapter=SHA_B,
    layout_version=99,
    position_scheme="relative",
    tokenizer=SHA_B,
    placeholders=(7,),
    weight_epoch=1,
    regime="numeric",
    chunk=32,
    batch=3,
    tiles=(),
    implementation="pallas",
    backend="gpu",
    device_kind="H200",
    precision="matmul=highest x64=False",
    jax_version="1",
)


def test_every_field_has_a_change():
    assert set(CHANGES) == {x.name for x in dataclasses.fields(Identity)}


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_changes_the_identity_in_the_exact_regime(field):
    assert identity().digest != identity(**{field: CHANGES[field]}).digest


@pytest.mark.parametrize("field", sorted(set(CHANGES) - {"regime"}))
def test_numeric_regime_shares_across_numeric_fields_only(field):
    same = identity(regime="numeric")
    changed = identity(regime="numeric", **{field: CHANGES[field]})
    assert (same.digest == changed.digest) == (field in NUMERIC_FIELDS)


def test_incomplete_exact_identities_are_refused():
    for change in (dict(chunk=0), dict(batch=0), dict(backend=""), dict(regime="roughly")):
        with pytest.raises(ValueError):
            identity(**change)


# -- read off what is really there -----------------------------------------------------------------


def params():
    return {"a": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": [jnp.ones(2), jnp.zeros((), jnp.int32)]}


def test_weights_digest_sees_values_shapes_dtypes_and_places():
    base = weights_digest(params())
    assert base == weights_digest(params())
    assert base == weights_digest(
        {**params(), "a": {"w": np.arange(6.0, dtype="f4").reshape(2, 3)}}
    )
    changed = [
        {**params(), "a": {"w": jnp.arange(6.0).reshape(2, 3).at[1, 2].add(1e-3)}},
        {**params(), "a": {"w": jnp.arange(6.0).reshape(3, 2)}},
        {**params(), "a": {"w": jnp.arange(6.0).reshape(2, 3).astype(jnp.bfloat16)}},
        {**params(), "a": {"v": jnp.arange(6.0).reshape(2, 3)}},
        {**params(), "b": [jnp.zeros((), jnp.int32), jnp.ones(2)]},
        {**params(), "c": jnp.zeros(0)},
        {"a": params()["a"]},
    ]
    assert len({base, *map(weights_digest, changed)}) == len(changed) + 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float8_e4m3fn", "bool"])
def test_weights_digest_takes_any_dtype(dtype):
    value = jnp.ones((2, 3), dtype)
    assert weights_digest([value]) == weights_digest([np.asarray(value)])
    assert weights_digest([value]) != weights_digest([jnp.zeros((2, 3), dtype)])


def test_non_contiguous_weights():
    value = np.arange(6.0).reshape(2, 3).T
    assert weights_digest([value]) == weights_digest([value.copy()])


def test_effective_dtypes_are_read_off_the_leaves():
    def with_dtype(dtype):
        name, leaf = synthetic.FULL.leaves[0]
        leaves = ((name, dataclasses.replace(leaf, dtype=dtype)), *synthetic.FULL.leaves[1:])
        layer = dataclasses.replace(synthetic.FULL, leaves=leaves)
        return CacheSpec((Segment(1, (layer,)),), chunk=16, block=8)

    half, other = with_dtype("bfloat16"), with_dtype("float16")
    assert half.block_bytes() == other.block_bytes()  # nothing else would notice
    ids = [Identity.of(spec, params(), {}, batch=1).digest for spec in (half, other)]
    assert ids[0] != ids[1]
    # Another way to say the same dtype is the same.
    assert describe_leaves(with_dtype("bfloat16")) == describe_leaves(with_dtype(jnp.bfloat16))


def test_identity_of_takes_geometry_and_device_from_what_it_is_given():
    spec = synthetic.everything(chunk=32, block=16)
    found = Identity.of(spec, params(), {"d_model": 8}, batch=4, tokenizer=SHA_A)
    assert (found.block, found.chunk, found.batch) == (16, 32, 4)
    assert found.tiles == (("csa entries", 4),)
    assert found.backend == "cpu" and found.device_kind
    assert found.tokenizer == SHA_A
    assert found.weights == weights_digest(params())


TILED, OTHER = (
    {"chip": {f"op/{name}": {"heads=2": {"entries": n}} for name in ("pallas_tpu", "pallas_gpu")}}
    for n in (8, 16)
)


def of_chip(platform, monkeypatch, table, **options):
    monkeypatch.setattr(kernel_tuning, "load", lambda: table)
    device = types.SimpleNamespace(platform=platform, device_kind="chip")
    monkeypatch.setattr(identity_module, "_device", lambda params: device)
    return Identity.of(synthetic.everything(), params(), {}, batch=1, **options)


@pytest.mark.parametrize(
    "platform, kernels", [("tpu", "auto"), ("tpu", "reference"), ("gpu", "pallas_gpu")]
)
def test_tiles_of_kernels_count_where_kernels_run(monkeypatch, platform, kernels):
    found = [of_chip(platform, monkeypatch, t, kernels=kernels) for t in (TILED, OTHER, {})]
    assert len({x.digest for x in found}) == 3
    assert (f"op/pallas_{platform}[heads=2].entries", 8) in found[0].tiles


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_no_table_changes_the_identity_of_the_references(monkeypatch, platform):
    found = [of_chip(platform, monkeypatch, t) for t in (TILED, OTHER, {})]
    assert len({x.digest for x in found}) == 1
    assert found[0].implementation == "reference" and found[0].tiles == (("csa entries", 4),)


def test_another_kernel_or_another_revision_is_another_identity(monkeypatch):
    def digest_of(**options):
        return of_chip("tpu", monkeypatch, {}, **options).digest

    auto = digest_of()
    assert auto == digest_of(kernels="auto") == digest_of(kernels="pallas_tpu")
    assert auto != digest_of(kernels="reference")
    monkeypatch.setattr(kernel_regime, "REVISION", 99)
    assert auto != digest_of()
    with pytest.raises(ValueError, match="kernels='fast'"):
        digest_of(kernels="fast")


def test_the_configuration_says_which_kernels_run():
    spec = synthetic.everything()

    def implementation(config):
        return Identity.of(spec, params(), config, batch=1).implementation

    assert implementation({"kernels": "interpret"}) == implementation(Kernels())
    assert "interpret" in implementation(Kernels()) and implementation({}) == "reference"


@dataclasses.dataclass
class Kernels:
    kernels: str = "interpret"


@dataclasses.dataclass
class Config:
    width: int = 3
    name: str = "x"
    scale: float = 0.5
    kinds: tuple = ("swa", "csa")


def test_config_digest():
    assert config_digest(Config()) == config_digest(dataclasses.asdict(Config()))
    changed = [Config(4), Config(name="y"), Config(scale=0.25), Config(kinds=("swacsa",))]
    assert len({config_digest(x) for x in [Config(), *changed]}) == 5


# -- encoding --------------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
    | st.binary(),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text("ab", max_size=2), x, max_size=3),
    max_leaves=8,
)


def normal(value):
    """Equal exactly where encodings must be equal (1, True and 1.0 differ; 0.0 and -0.0 too)."""
    if isinstance(value, list | tuple):
        return ("list", tuple(normal(x) for x in value))
    if isinstance(value, dict):
        return ("dict", tuple(sorted((k, normal(v)) for k, v in value.items())))
    return (type(value).__name__, repr(value))


@given(PLAIN, PLAIN)
def test_encoding_is_injective(a, b):
    assert (encode(a) == encode(b)) == (normal(a) == normal(b))


@pytest.mark.parametrize(
    "a, b",
    [
        (["ab", "c"], ["a", "bc"]),
        (["a", ["b"]], [["a"], "b"]),
        ([[], []], [[]]),
        ("1", 1),
        (1, True),
        (b"a", "a"),
        (None, ""),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ({"a": {"b": 1}}, {"a": {}, "b": 1}),
    ],
)
def test_framing_boundaries(a, b):
    assert encode(a) != encode(b)


def test_encoding_of_numpy_scalars_and_order_of_mappings():
    assert encode(np.int64(3)) == encode(3)
    assert encode({"a": 1, "b": 2}) == encode({"b": 2, "a": 1})
    assert encode((1, 2)) == encode([1, 2])


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, np.zeros(3), [object()], int])
def test_what_has_no_injective_encoding_is_refused(value):
    with pytest.raises(TypeError):
        encode(value)


# -- keys ------------------------------------------------------------------------------------------

TOKENS = np.random.default_rng(0).integers(0, 1000, 43)


def keys(tokens=TOKENS, tenant="", extra=None, who=None):
    return block_keys(who or identity(), tokens, tenant, extra)


def test_one_key_per_complete_block():
    for length in range(0, 43):
        found = keys(TOKENS[:length])
        assert len(found.keys) == length // 8
        assert found.keys == keys().keys[: length // 8]
        assert found.length == length and not found.refusal
    assert len(set(keys().keys)) == 5


@pytest.mark.parametrize("at", range(43))
def test_each_token_changes_its_block_and_all_later_ones_only(at):
    changed = TOKENS.copy()
    changed[at] += 1
    a, b = keys(), keys(changed)
    for block in range(5):
        assert (a.keys[block] == b.keys[block]) == (block < at // 8)


def test_order_and_container_of_tokens():
    swapped = TOKENS.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert keys(swapped).keys[0] != keys().keys[0]
    for same in (TOKENS.tolist(), TOKENS.astype(np.uint32), jnp.asarray(TOKENS), TOKENS[::1]):
        assert keys(same).keys == keys().keys


def test_equal_blocks_of_different_prefixes_differ():
    # An entry depends on all tokens before it, so the same block elsewhere is not the same.
    tokens = np.tile(np.arange(8), 4)
    assert len(set(keys(tokens).keys)) == 4


def test_tenants_adapters_and_identities_share_nothing():
    variants = [
        keys(),
        keys(tenant="a"),
        keys(tenant="b"),
        keys(extra={"adapter": SHA_A}),
        keys(extra={"adapter": SHA_B}),
        keys(tenant="a", extra={"adapter": SHA_A}),
        keys(who=identity(weight_epoch=1)),
    ]
    everything = [x for v in variants for x in (v.root, *v.keys)]
    assert len(set(everything)) == len(everything)
    assert keys(extra={}).keys == keys(extra=None).keys == keys(extra={"adapter": ""}).keys


def test_media_changes_the_blocks_it_overlaps_and_those_after():
    media = {"media": [(10, 8, SHA_A)]}
    a, b, c = keys(), keys(extra=media), keys(extra={"media": [(10, 8, SHA_B)]})
    assert a.keys[0] == b.keys[0] == c.keys[0]
    assert len({x.keys[1] for x in (a, b, c)}) == len({x.keys[4] for x in (a, b, c)}) == 3
    # A digest that agrees in its last 16 bits is another digest.
    close = "f" + SHA_A[1:]
    assert keys(extra={"media": [(10, 8, close)]}).keys[1] != b.keys[1]
    # A block in the middle of a span is not one with plain tokens.
    middle = keys(extra={"media": [(4, 24, SHA_A)]})
    assert middle.keys[0] != a.keys[0] and middle.contents[1] != a.contents[1]
    moved = keys(extra={"media": [(11, 7, SHA_A)]})
    assert moved.keys[1] != b.keys[1]


MALFORMED = [
    dict(extra={"lora": "x"}),
    dict(extra={"adapter": SHA_A, "unknown": 1}),
    dict(extra={"adapter": "short"}),
    dict(extra={"adapter": SHA_A.upper()}),
    dict(extra={"adapter": None}),
    dict(extra={"adapter": np.zeros(3)}),
    dict(extra=["adapter"]),
    dict(extra={"media": SHA_A}),
    dict(extra={"media": [SHA_A]}),
    dict(extra={"media": [(0, 4, SHA_A[:16])]}),
    dict(extra={"media": [(0, 0, SHA_A)]}),
    dict(extra={"media": [(-1, 4, SHA_A)]}),
    dict(extra={"media": [(40, 8, SHA_A)]}),
    dict(extra={"media": [(0.0, 4, SHA_A)]}),
    dict(extra={"media": [(True, 4, SHA_A)]}),
    dict(extra={5: 6}),
    dict(tenant=None),
    dict(tenant=7),
    dict(tenant="\ud800"),
    dict(tokens=TOKENS.astype(np.float32)),
    dict(tokens=TOKENS.reshape(1, -1)),
    dict(tokens=-TOKENS),
    dict(tokens=TOKENS + 2**31),
    dict(tokens=["a", "b"]),
    dict(tokens=[[1], [2, 3]]),
    dict(tokens=None),
]


@pytest.mark.parametrize("arguments", MALFORMED, ids=repr)
def test_unknown_or_malformed_input_is_not_cacheable(arguments):
    found = keys(**arguments)
    assert found.refusal and not found.keys


def test_placeholder_tokens_need_a_digest():
    who = identity(placeholders=(5, 6))
    tokens = np.array([1, 2, 5, 5, 5, 3, 4, 1, 2])
    assert not block_keys(who, tokens[5:]).refusal
    assert "placeholder" in block_keys(who, tokens).refusal
    assert "placeholder" in block_keys(who, tokens, extra={"media": [(2, 2, SHA_A)]}).refusal
    assert not block_keys(who, tokens, extra={"media": [(2, 3, SHA_A)]}).refusal


PROGRAM = """
from tests.hetero_kv.prefix import identity_test as t
extra = {"media": [(10, 8, t.SHA_A)], "adapter": t.SHA_B}
found = t.keys(tenant="é", extra=extra)
print(t.identity().digest.hex(), found.keys[-1].hex(), t.digest({"b": {"x": 1.5}, "a": None}))
"""


def test_keys_are_equal_in_every_process():
    printed = set()
    for seed in ("1", "4711"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
        printed.add(run.stdout)
    extra = {"media": [(10, 8, SHA_A)], "adapter": SHA_B}
    found = keys(tenant="é", extra=extra)
    here = (identity().digest.hex(), found.keys[-1].hex(), digest({"b": {"x": 1.5}, "a": None}))
    assert printed == {" ".join(here) + "\n"}


def test_the_encoding_is_pinned():
    # A change here makes all that was ever stored unreachable: only ever do so knowingly.
    pinned = "4f1230be066f9f4abc322f0691e0d34fe39ab872251433cb8a556fd103d9c98b"
    assert digest([1, "a", None, {"x": b"y"}]) == pinned
