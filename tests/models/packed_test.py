"""Caches of packed rows: attention sees what is read of them, whichever way the tokens come."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from hetero_kv import validate
from hetero_kv.contract import History
from hetero_kv.packing import KINDS, POISON
from hetero_kv.prefix import Identity, PrefixStore
from hetero_kv.state import Cache
from models import geometries
from models.config import DecoderConfig
from tests.models import families, tiny

NAME = "packed"
ALL = [NAME, *(pytest.param(x, marks=pytest.mark.full) for x in families.PACKED)]
each = pytest.mark.parametrize("name", ALL)


def run(name: str, sizes: tuple[int, ...]) -> tuple[np.ndarray, Cache]:
    """Prefill calls of those sizes in both rows, in a poisoned cache."""
    made, params = tiny.model(name)
    cache, out, at = tiny.empty(made, poison=True), [], 0
    for size in sizes:
        logits, cache = made.prefill(params, tiny.tokens()[:, at : at + size], cache)
        out.append(np.asarray(logits))
        at += size
    return np.concatenate(out, axis=1), cache


def first_difference(name: str, one: Cache, two: Cache) -> int:
    """The first token of any row whose stored rows differ: those behind it may differ by much.

    A value that is on the border between two codes gets one or the other by its last bits.
    """
    made, first = tiny.model(name)[0], tiny.CAPACITY
    for slot in made.cache_spec.slots():
        if slot.leaf.packing is None:
            continue
        length = int(one.length[0])
        a, b = (np.asarray(x.leaf(slot)) for x in (one, two))
        differs = (a != b).any(axis=(0, 1, -1)) & slot.leaf.live_rows(length, tiny.CAPACITY)
        if isinstance(slot.leaf.contract, History):
            at = slot.leaf.contract.span - 1 + slot.leaf.contract.stride * np.arange(differs.size)
        else:
            at = slot.leaf.ring_positions(length)
        first = min(first, *at[differs].tolist(), tiny.CAPACITY)
    return first


@each
def test_rows_are_bytes_that_read_as_the_width(name: str) -> None:
    made, _ = tiny.model(name)
    cache = tiny.empty(made, poison=True)
    packed = [x for x in made.cache_spec.slots() if x.leaf.packing]
    assert {x.name for x in packed} >= set(made.config.cache_layouts)
    for slot in packed:
        leaf = cache.leaf(slot)
        assert leaf.dtype == jnp.uint8 and (leaf == POISON).all()
        assert leaf.shape[-1] == slot.leaf.packing.bytes == slot.leaf.row_bytes
        assert jnp.isnan(slot.leaf.numbers(leaf)).all()
    assert made.cache_spec.cache_bytes(tiny.ROWS, tiny.CAPACITY) == sum(
        x.nbytes for x in jax.tree.leaves(cache)
    )


@each
def test_splits_on_the_grid_have_the_same_bits(name: str) -> None:
    (want, whole), (got, cache) = run(name, (64,)), run(name, (16, 32, 16))
    np.testing.assert_array_equal(got, want)
    tiny.assert_same_state(tiny.model(name)[0], cache, whole)
    assert np.isfinite(want).all()


@each
def test_forward_other_splits_and_decode_agree(name: str) -> None:
    _, whole = run(name, (60,))
    want = tiny.forward(name)
    got, cache = run(name, (3, 16, 7, 18))
    logits, cache = tiny.decode(name, cache, 16)
    got = np.concatenate([got, logits], axis=1)
    stop = first_difference(name, cache, whole)
    print(f"{name}: equal codes as far as {stop}")
    stop = min(stop, got.shape[1])
    assert stop >= 20
    np.testing.assert_allclose(got[:, :stop], want[:, :stop], atol=3e-5, rtol=0)


@each
def test_damaged_and_unwritten_rows_are_told_from_numbers(name: str) -> None:
    made, _ = tiny.model(name)
    _, cache = run(name, (29,))
    check = jax.jit(functools.partial(validate.evidence, made.cache_spec, finite=True))
    assert check(cache).ok.all()
    for slot in made.cache_spec.slots():
        if slot.leaf.packing is None:
            continue
        live = np.flatnonzero(slot.leaf.live_rows(29, tiny.CAPACITY))
        leaf = cache.leaf(slot).at[:, 1, live[0]].set(POISON)
        verdict = check(cache.with_leaves({slot: leaf}))
        assert verdict.ok.tolist() == [True, False]
        told = validate.describe(made.cache_spec, verdict, 1)
        assert told == [f"{slot.leaf.component}: nonfinite"]


@each
def test_published_and_resumed_from_memory_and_disk(name: str, tmp_path) -> None:
    made, params = tiny.model(name)
    spec, tokens = made.cache_spec, tiny.tokens()[0]
    identity = Identity.of(spec, params, made.config, batch=tiny.ROWS)
    options = dict(host_bytes=1 << 24, disk_dir=tmp_path, disk_bytes=1 << 24)
    want, _ = run(name, (48, 14))
    store = PrefixStore(spec, identity, **options)
    store.publish(tokens[:48], run(name, (48,))[1], 0, points=(48,))

    def resumed(store: PrefixStore) -> int:
        with store.lookup(tokens[:62]) as lease:
            length = lease.resumable_length
            cache = store.restore(lease, tiny.empty(made, poison=True), 0)
        if length:
            rest, count = tiny.tokens()[:, length:62], np.array([62 - length, 0])
            logits, cache = made.prefill(params, rest, cache, count)
            np.testing.assert_array_equal(np.asarray(logits)[0], want[0, length:])
        assert store.verify() == []
        return length

    assert resumed(store) == 48
    store.flush()
    store.close()
    for config, length in ((made.config, 48), (made.config.replace(cache_layouts={}), 0)):
        again = PrefixStore(spec, Identity.of(spec, params, config, batch=tiny.ROWS), **options)
        assert resumed(again) == length  # what is on the disk is found by its own identity alone
        again.close()


def test_layouts_alone_make_another_identity() -> None:
    _, params = tiny.model(NAME)
    base, found = tiny.config(NAME), set()
    for kind in ("fp8_f32", "fp4", "int8", None):
        made = models.build(base.replace(cache_layouts={"kv": kind}))
        found.add(Identity.of(made.cache_spec, params, {}, batch=1).digest)
    made = models.build(base.replace(cache_layouts={"kv": "int8"}, cache_align=128))
    found.add(Identity.of(made.cache_spec, params, {}, batch=1).digest)
    assert len(found) == 5


@functools.cache
def sensitivity(leaf: str, kind: str) -> float:
    """Root mean square change of the logits of "packed" where one leaf is stored so."""
    params, plain = tiny.model(NAME)[1], tiny.config(NAME, cache_layouts={})
    logits = [
        jax.jit(models.build(x).forward, compiler_options=tiny.FAST_COMPILE)(params, tiny.tokens())
        for x in (plain, plain.replace(cache_layouts={leaf: kind}))
    ]
    # Tokens before the indexer has anything to choose: what it picks changes logits by steps.
    one, two = (np.asarray(x)[:, :12] for x in logits)
    return float(np.sqrt(np.mean((one - two) ** 2)) / np.sqrt(np.mean(one**2)))


@pytest.mark.full
@pytest.mark.parametrize("leaf", ["kv", pytest.param("window", marks=pytest.mark.full)])
def test_finer_layouts_change_less(leaf: str) -> None:
    errors = {kind: sensitivity(leaf, kind) for kind in ("int8", "fp8_f32", "fp4")}
    print(leaf, errors)
    assert 0 < errors["int8"] < errors["fp8_f32"] < errors["fp4"]
    assert errors["int8"] < 0.02 and errors["fp8_f32"] < 0.06 and errors["fp4"] < 0.3


@pytest.mark.full
def test_training_passes_gradients_through() -> None:
    made, params = tiny.model(NAME)
    tokens = tiny.tokens()[:, :20]

    def loss(params) -> jax.Array:
        return jnp.mean(made.forward(params, tokens) ** 2)

    slopes = jax.jit(jax.grad(loss), compiler_options=tiny.FAST_COMPILE)(params)
    attn = slopes["segments"]["2"]["0"]["attn"] if "2" in slopes["segments"] else None
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
    moved = slopes["segments"] if attn is None else attn
    named = jax.tree_util.tree_flatten_with_path(moved)[0]
    for path, slope in named:
        if jax.tree_util.keystr(path).endswith("['k']"):
            assert np.abs(slope).max() > 0


def test_deployed_models_have_the_published_rows() -> None:
    sizes = {}
    for name in geometries.DEPLOYED:
        made = models.build(geometries.deployed(name))
        cache = made.abstract_cache(1, 4_096)
        for slot in made.cache_spec.slots():
            if slot.leaf.packing:
                sizes[name, slot.name] = cache.leaf(slot).shape[-1]
    assert sizes == {
        ("v4_flash", "window"): 584,
        ("v4_flash", "entries"): 584,
        ("v4_flash", "index_keys"): 68,
        ("v4_pro", "window"): 584,
        ("v4_pro", "entries"): 584,
        ("v4_pro", "index_keys"): 68,
        ("v3_2", "latent"): 656,
        ("v3_2", "index_keys"): 132,
    }


def test_aligned_rows_have_more_bytes() -> None:
    plain = tiny.model(NAME)[0]
    made = models.build(tiny.config(NAME, cache_align=128))
    packed = [x.leaf for x in made.cache_spec.slots() if x.leaf.packing]
    own = [x.leaf for x in plain.cache_spec.slots() if x.leaf.packing]
    assert packed and len(packed) == len(own)
    for leaf, before in zip(packed, own, strict=True):
        assert leaf.packing.align == 128
        assert leaf.row_bytes == leaf.packing.bytes == -(-before.row_bytes // 128) * 128
    cache = tiny.empty(made, poison=True)
    sizes = (x.nbytes for x in jax.tree.leaves(cache))
    assert made.cache_spec.cache_bytes(tiny.ROWS, tiny.CAPACITY) == sum(sizes)


@pytest.mark.full
def test_aligned_rows_have_the_same_values() -> None:
    plain, params = tiny.model(NAME)
    made, tokens = models.build(tiny.config(NAME, cache_align=128)), tiny.tokens()[:, :32]
    cache = tiny.empty(made, poison=True)
    got = made.prefill(params, tokens, cache)[0]
    want = plain.prefill(params, tokens, tiny.empty(plain, poison=True))[0]
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_deployed_models_with_aligned_rows() -> None:
    sizes = {}
    for name in geometries.DEPLOYED:
        spec = models.build(geometries.deployed(name).replace(cache_align=128)).cache_spec
        sizes |= {(name, x.name): x.leaf.row_bytes for x in spec.slots() if x.leaf.packing}
    assert sizes == {
        ("v4_flash", "window"): 640,
        ("v4_flash", "entries"): 640,
        ("v4_flash", "index_keys"): 128,
        ("v4_pro", "window"): 640,
        ("v4_pro", "entries"): 640,
        ("v4_pro", "index_keys"): 128,
        ("v3_2", "latent"): 768,
        ("v3_2", "index_keys"): 256,
    }


GROUPED = dict(layer_types=("full",), mlp_types=("dense",))
LAYOUTS = ", ".join(KINDS)


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(cache_layouts={"entries": "fp9"}), f"'csa'.*'entries'.*'fp9'.*use one of {LAYOUTS}"),
        (
            dict(cache_layouts={"index_keys": "fp8_rope"}),
            "no layout of its rows; use one of fp8_f32",
        ),
        (dict(cache_layouts={"tail": "int8"}), r"'csa': cache_layouts\['tail'\]='int8'.*leave"),
        (dict(cache_layouts={"kv": "int8"}), "can be packed are window, entries, index_keys"),
        (dict(cache_layouts={"entries": "fp4"}, head_dim=34), "34 values do not divide into .* 32"),
        (dict(cache_layouts={"window": "fp8_rope"}, head_dim=116), "100 values do not divide"),
        (dict(cache_layouts={"window": "fp8_rope"}, rope_dim=0), "use one of fp8_f32"),
        (dict(cache_layouts={"window": "fp8_rope"}, head_dim=16), "need 0 <= rope < width"),
        (dict(cache_layouts={"entries": "int8"}, cache_dtype="float16"), "not 'float16'"),
        (
            dict(cache_layouts={"entries": "int8"}, cache_align=-1),
            "cache_align=-1: an integer >= 0",
        ),
        (dict(cache_layouts=["int8"]), "maps names of leaves to layouts"),
        (
            dict(attention={"csa": {"cache_align": 128}}),
            r"attention\['csa'\]: cache_align=128 .*cache_layouts, or leave cache_align out",
        ),
        (dict(attention={"csa": {"cache_align": 1 << 20}}), "cache_align=1048576: bytes from 0"),
        (dict(attention={"csa": {"cache_layouts": ["int8"]}}), "'csa'.*maps names of leaves"),
        (
            dict(attention={"csa": {"cache_layouts": {"entrys": "int8"}}}),
            r"attention\['csa'\]: cache_layouts\['entrys'\]='int8'.*window, entries, index_keys",
        ),
        (GROUPED | dict(cache_layouts={"kv": "fp8_rope"}), "'full': .* use one of fp8_f32, fp4"),
        (
            dict(attention={"csa": {"cache_layouts": {"tail": "fp4"}}}),
            r"attention\['csa'\]\['cache_layouts'\]",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(changes: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        models.build(DecoderConfig().replace(**changes))


def test_a_layer_type_may_differ() -> None:
    own = {"csa": {"cache_layouts": {"entries": "fp4"}}}
    config = DecoderConfig(cache_layouts={"window": "int8"}, attention=own)
    slots = models.build(config).cache_spec.slots()
    found = {(x.kind, x.name): x.leaf.packing.kind for x in slots if x.leaf.packing}
    assert found == {("swa", "window"): "int8", ("csa", "entries"): "fp4"}
    own["csa"]["cache_align"] = 64
    slots = models.build(config.replace(attention=own)).cache_spec.slots()
    found = {(x.kind, x.name): x.leaf.packing.align for x in slots if x.leaf.packing}
    assert found == {("swa", "window"): 0, ("csa", "entries"): 64}


def test_kernels_leave_packed_windows_to_the_reference() -> None:
    """By its name a kernel refuses them; "auto" lowers the step for TPU without one."""
    config = tiny.config(NAME, kernels="interpret")
    made, params = models.build(config), tiny.model(NAME)[1]
    token = np.zeros(tiny.ROWS, np.int32)
    with pytest.raises(NotImplementedError, match=r"packed rows .*reference"):
        made.decode_step(params, token, tiny.empty(made))
    made, _ = tiny.model(NAME)
    arguments = made.abstract_params(), jax.ShapeDtypeStruct((2,), jnp.int32)
    step = functools.partial(made.stack.step, active=None)
    exported = jax.export.export(jax.jit(step), platforms=["tpu"])
    assert "tpu_custom_call" not in exported(*arguments, made.abstract_cache(2, 64)).mlir_module()
