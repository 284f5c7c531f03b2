"""Chunk attention for Mosaic GPU (Hopper and later): rows by TMA, one online softmax per block.

A block has 64 rows of queries x heads of one sequence. One warpgroup fetches tiles of keys: of the
ring, of the call's own rows, then of entries, up to the last that the block sees; the others each
own a part of the channels. bfloat16 is multiplied on tensor cores (`tensor_cores_gpu`), float32
without them (`cuda_cores_gpu`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from hetero_kv.attention.attend import MASKED
from hetero_kv.kernels import paging
from hetero_kv.kernels.chunk_attention import cuda_cores_gpu, plan_gpu, tensor_cores_gpu
from hetero_kv.kernels.chunk_attention.operands import Operands, Rule
from hetero_kv.kernels.chunk_attention.plan_gpu import Plan
from hetero_kv.kernels.hopper import GROUP, ROWS

_NAME = "chunk_attention/pallas_gpu"


def _body(operands: Operands) -> Any:
    """The module with the kernel's body for these types."""
    return tensor_cores_gpu if operands.q.dtype == jnp.bfloat16 else cuda_cores_gpu


def _plan(rule: Rule, operands: Operands) -> Plan:
    return Plan(rule, operands, _body(operands).TILE)


def check(rule: Rule, operands: Operands) -> None:
    """Raises NotImplementedError for what this kernel cannot take."""
    heads, plan, body = operands.q.shape[2], _plan(rule, operands), _body(operands)
    types = {jnp.dtype(x) for x in plan.dtypes}
    if len(types) > 1 or not types <= {jnp.dtype("float32"), jnp.dtype("bfloat16")}:
        raise NotImplementedError(
            f"{_NAME}: queries and rows of {sorted(map(str, types))}; all float32, or all bfloat16"
        )
    body.check(_NAME, plan)
    if heads % ROWS and (ROWS % heads or heads & (heads - 1)):
        raise NotImplementedError(f"{_NAME}: {heads=}; a divisor of {ROWS} or a multiple")
    if plan.copy % body.COPY:
        raise NotImplementedError(
            f"{_NAME}: a window of {plan.width} rows and pages of {plan.page} entries cannot be "
            f"copied in equal groups of {GROUP} to {ROWS} rows"
        )
    if plan.chosen and (heads % ROWS or plan.capacity % ROWS):
        raise NotImplementedError(
            f"{_NAME}: choices of {heads=} among {plan.capacity} entries; multiples of {ROWS} only"
        )


def run(rule: Rule, operands: Operands, interpret: Any = None) -> jax.Array:
    """See `api.chunk_attention`."""
    plan, body = _plan(rule, operands), _body(operands)
    window, entries = operands.window, operands.entries
    rows = plan.size * plan.heads
    q = operands.q.reshape(plan.batch, rows, plan.channels)
    q = jnp.pad(q, ((0, 0), (0, plan.blocks * ROWS - rows), (0, 0))) if rows % ROWS else q
    sinks = operands.sinks
    sinks = jnp.full(plan.heads, MASKED) if sinks is None else sinks.astype(jnp.float32)
    repeats = -(-ROWS // plan.heads)
    layer = jnp.asarray(operands.layer, jnp.int32).reshape(1)
    arrays = [layer, operands.start, operands.count, jnp.tile(sinks, repeats), q]
    bad = jnp.zeros(plan.batch, bool)
    if window is not None:
        own = window.kv.astype(window.rows.dtype)
        more = plan.own_tiles * plan.tile  # a block's tiles may go beyond the last row
        arrays += [window.first, window.rows, jnp.pad(own, ((0, 0), (0, more), (0, 0)))]
    if entries is not None:
        view = paging.view(entries.pool, plan.tile)
        places, bad = plan_gpu.places(plan, view, operands)
        if plan.chosen:
            chosen = entries.chosen
            arrays += [chosen.order, chosen.low, chosen.cut]
        arrays += [places, view.pages]
    out = plgpu.kernel(
        body.kernel(plan),
        out_type=jax.ShapeDtypeStruct((plan.batch, plan.blocks * ROWS, plan.channels), jnp.float32),
        grid=(plan.batch, plan.blocks),
        grid_names=("row", "block"),
        num_threads=body.parts(plan) + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*arrays)
    out = jnp.where(bad[:, None, None], jnp.nan, out[:, :rows])
    return out.reshape(operands.q.shape)
