"""Decode attention for Mosaic GPU (Hopper and later): rows by TMA, one online softmax per block.

A block has one sequence, 64 heads and every S-th tile of rows; one warpgroup fetches tiles, the
others each own a part of the channels. The softmaxes of the S parts are joined by XLA. bfloat16
is multiplied on tensor cores (`tensor_cores_gpu`), float32 without them (`cuda_cores_gpu`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.kernels import checks, hopper, paging, tuning, unpack_gpu
from hetero_kv.kernels.decode_attention import cuda_cores_gpu, plan_gpu, tensor_cores_gpu
from hetero_kv.kernels.decode_attention.operands import Operands
from hetero_kv.kernels.decode_attention.plan_gpu import Plan
from hetero_kv.kernels.hopper import GROUP, ROWS

_NAME = "decode_attention/pallas_gpu"


@dataclasses.dataclass(frozen=True)
class Tiles:
    """splits: blocks that share a sequence's rows; 0: as many as fill a device. stages: tiles in
    shared memory."""

    splits: int = 0
    stages: int = 2

    def __post_init__(self):
        checks.count("tiles.splits", self.splits, 0)
        checks.count("tiles.stages", self.stages)


def key(operands: Operands) -> str:
    """The bucket of these shapes in the tuning table."""
    batch, heads, width = operands.q.shape
    dtype, tiles = str(operands.q.dtype), _plan(operands).tiles
    return tuning.bucket(batch=batch, heads=heads, width=width, tiles=tiles, dtype=dtype)


def choose(operands: Operands) -> Tiles:
    """The tile sizes for these shapes: those of the tuning table, else the heuristic."""
    room = _body(operands).shared(_plan(operands), 2) <= hopper.SHARED
    return tuning.pick(_NAME, "cuda", key(operands), Tiles(stages=2 if room else 1))


def _body(operands: Operands) -> Any:
    """The module with the kernel's body for these types."""
    return tensor_cores_gpu if operands.q.dtype == jnp.bfloat16 else cuda_cores_gpu


def _plan(operands: Operands) -> Plan:
    body = _body(operands)
    operands = jax.eval_shape(lambda x: plan_gpu.plain(x)[0], operands)
    return Plan(operands, body.TILE, body.PICK)


def check(operands: Operands, tiles: Tiles | None = None) -> None:
    """Raises NotImplementedError for what this kernel cannot take."""
    checks.tiles(tiles, Tiles)
    plan, body = _plan(operands), _body(operands)
    if plan.dtypes[0] not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"{_NAME}: {plan.dtypes[0]}; float32 and bfloat16 only")
    if plan.packing:
        unpack_gpu.check(_NAME, plan.packing)
        if unpack_gpu.Unpack(plan.packing).order is not None:
            raise NotImplementedError(
                f"{_NAME}: {plan.packing.kind} entries; two channels of a byte would have to be "
                "put apart, which the indexer's queries follow and those of attention do not"
            )
        most = plan.width // body.parts(plan)
        if plan.packing.rope > most:
            raise NotImplementedError(
                f"{_NAME}: {plan.packing.rope} of {plan.width} channels stored as bfloat16; at "
                f"most {most}, since one warpgroup joins their bytes"
            )
    body.check(_NAME, plan)
    if plan.window_copy % body.COPY or (not plan.packing and plan.copy % body.COPY):
        raise NotImplementedError(
            f"{_NAME}: a window of {plan.window} rows and pages of {plan.page} entries cannot be "
            f"copied in equal groups of {GROUP} to {plan.tile} rows"
        )
    stages = (tiles or choose(operands)).stages
    if (need := body.shared(plan, stages)) > hopper.SHARED:
        raise NotImplementedError(
            f"{_NAME}: {stages} tiles of {plan.width} channels need {need} bytes of shared memory, "
            f"of {hopper.SHARED}; use fewer stages"
        )


def run(
    operands: Operands, *, scale: float, tiles: Tiles | None = None, interpret: Any = None
) -> jax.Array:
    """See `api.decode_attention`."""
    tiles = tiles or choose(operands)
    operands, layers = plan_gpu.plain(operands)
    plan, window, entries = _plan(operands), operands.window, operands.entries
    splits = plan.splits(tiles.splits)
    pad = plan.groups * ROWS - plan.heads
    q = jnp.pad(operands.q, ((0, 0), (0, pad), (0, 0))).reshape(-1, ROWS, plan.width)
    seen, count = plan_gpu.live(plan, operands)
    arrays = [layers, count, seen, q]
    bad = jnp.zeros(plan.batch, bool)
    if window is not None:
        arrays.append(window.rows)
    if entries is not None:
        view = paging.view(entries.pool, plan.tile)
        places, bad = plan_gpu.places(plan, view, entries)
        arrays += [places, view.pages]
    body = _body(operands)
    parts = (plan.batch * plan.groups, splits, ROWS)
    kernel = plgpu.kernel(
        body.kernel(plan, splits, tiles.stages, scale),
        out_type=(
            jax.ShapeDtypeStruct((*parts, plan.width), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        grid=(plan.batch, plan.groups, splits),
        grid_names=("row", "group", "split"),
        num_threads=body.parts(plan) + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    out = plan_gpu.join(*kernel(*arrays), operands.sinks, plan)
    return jnp.where(bad[:, None, None], jnp.nan, out)
