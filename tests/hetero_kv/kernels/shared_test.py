"""Dispatch by lowering platform, tuning tables, and the test helpers themselves."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hetero_kv.kernels import dispatch, interpret, platform, tuning
from tests.hetero_kv.kernels import strict


def _double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def _double(x: jax.Array, interpreter=False) -> jax.Array:
    return pl.pallas_call(
        _double_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(),
        interpret=interpreter,
    )(x)


def _only_wide(x: jax.Array) -> None:
    if x.shape[-1] < 128:
        raise NotImplementedError("narrow")


BACKENDS = {
    "reference": dispatch.Backend(lambda x: x + x),
    "pallas_tpu": dispatch.Backend(_double, _only_wide),
    "interpret": dispatch.Backend(lambda x: _double(x, interpret.tpu())),
}


def _call(x: jax.Array, implementation: str = "auto") -> jax.Array:
    return dispatch.call("double", BACKENDS, implementation, x)


def test_auto_follows_the_lowering_platform() -> None:
    wide = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    assert strict.kernels_in(strict.lowered(_call, "tpu", wide), "tpu") == 1
    assert "custom_call" not in strict.lowered(_call, "cuda", wide)
    assert "custom_call" not in strict.lowered(_call, "cpu", wide)
    np.testing.assert_array_equal(jax.jit(_call)(jnp.ones((8, 128))), 2)


def test_auto_takes_the_reference_where_the_kernel_cannot() -> None:
    narrow = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    assert "custom_call" not in strict.lowered(_call, "tpu", narrow)
    with pytest.raises(NotImplementedError, match="narrow"):
        _call(jnp.ones((8, 64)), "pallas_tpu")


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="use one of"):
        _call(jnp.ones((8, 128)), "fast")
    with pytest.raises(NotImplementedError, match="pallas_gpu"):
        _call(jnp.ones((8, 128)), "pallas_gpu")


def test_a_kernel_on_another_platform_says_so() -> None:
    x = jnp.ones((8, 128))
    for run in (_call, jax.jit(_call, static_argnums=1)):
        with pytest.raises(NotImplementedError, match=r"double/pallas_tpu .* for 'cpu'"):
            run(x, "pallas_tpu")
    with pytest.raises(NotImplementedError, match="lowered for 'cuda'"):
        strict.lowered(lambda x: _call(x, "pallas_tpu"), "cuda", x)
    assert strict.kernels_in(strict.lowered(lambda x: _call(x, "pallas_tpu"), "tpu", x), "tpu") == 1


def test_the_mark_of_a_platform_is_the_identity_under_transformations() -> None:
    def run(x: jax.Array) -> jax.Array:
        return platform.only_on("tpu", "op", (x,))[0] * 2

    transformed = jax.vmap(jax.grad(lambda x: jnp.sum(run(x) ** 2)))
    assert "stablehlo" in strict.lowered(transformed, "tpu", jnp.ones((3, 2)))
    text = str(jax.make_jaxpr(transformed)(jnp.ones((3, 2))))
    assert "only_on" in text


def test_the_strict_interpreter_finds_what_it_should() -> None:
    np.testing.assert_array_equal(strict.tpu(_call, jnp.ones((8, 128)), "interpret"), 2)

    def run(kernel, **options):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(),
            interpret=interpret.tpu(),
            **options,
        )(jnp.ones((8, 128)))

    def forgets(x_ref, o_ref):
        o_ref[0:1] = x_ref[0:1]

    assert np.isnan(strict.tpu(run, forgets)[1:]).all()

    def does_not_wait(x_ref, o_ref, buffer, semaphore):
        copy = pltpu.make_async_copy(x_ref, buffer, semaphore)
        copy.start()
        o_ref[...] = buffer[...]
        copy.wait()

    scratch = [pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA(())]
    with pytest.raises(Exception, match=r"(?i)race|finite"):  # newer interpreters raise at once
        out = strict.tpu(lambda: run(does_not_wait, scratch_shapes=scratch))
        assert np.isfinite(out).all(), "not finite"


@dataclasses.dataclass(frozen=True)
class Tiles:
    """For the test."""

    rows: int = 8
    lanes: int = 128


def test_the_table_changes_the_heuristic_of_its_device_kind_only(monkeypatch, tmp_path) -> None:
    key = tuning.bucket(entries=1000, dtype="bfloat16")
    assert key == tuning.bucket(dtype="bfloat16", entries=1024) == "dtype=bfloat16,entries=1024"
    table = tuning.note({}, "TPU v9", "op/pallas_tpu", key, Tiles(rows=64))
    path = tmp_path / "table.json"
    tuning.save(table, path)
    table = tuning.load(path)
    for kind, rows in (("TPU v9", 64), ("TPU v8", 8), (None, 8)):
        monkeypatch.setattr(tuning, "device_kind", lambda platform, kind=kind: kind)
        assert tuning.pick("op/pallas_tpu", "tpu", key, Tiles(), table) == Tiles(rows=rows)
    assert tuning.pick("op/pallas_tpu", "tpu", "other", Tiles(), table) == Tiles()


def test_the_device_kind_is_that_of_the_lowering() -> None:
    assert tuning.device_kind("tpu") is None
    device = jax.sharding.AbstractDevice(device_kind="TPU v6 lite", num_cores=None, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("d",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert tuning.device_kind("tpu") == "TPU v6 lite"


def test_the_packaged_table_is_readable_and_another_version_is_refused(tmp_path) -> None:
    assert isinstance(tuning.load(), dict)
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"version": 0, "devices": {}}))
    with pytest.raises(ValueError, match="version"):
        tuning.load(path)
