"""Blocks in parallel against the token loops of the papers, in float64 and float32."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.attention import recurrence
from hetero_kv.attention.recurrence import Operands
from tests.oracle import recurrence as oracle

ROWS, HEADS, KEYS, VALUES = 2, 2, 5, 3
LENGTHS = (16, 70)  # within a block of either kind, and beyond
FAST = {"xla_backend_optimization_level": 0}  # to compile
DECAYS = {"none": 0.0, "slow": 0.02, "fast": 30.0}


@functools.cache
def drawn(tokens: int, channels: int, delta: bool, decay: str) -> tuple[Operands, np.ndarray]:
    """Keys that are nearly alike: the delta rule's triangular system is then far from diagonal."""
    rng = np.random.default_rng(tokens)
    lead = (ROWS, tokens, HEADS)
    q, k = rng.normal(size=(2, *lead, KEYS))
    k = 0.3 * k + rng.normal(size=(ROWS, 1, HEADS, KEYS))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    # Fast and slow in turns: what decays fast must not spoil what comes after it.
    pace = DECAYS[decay] * rng.exponential(size=(*lead, channels))
    pace = np.where(rng.random(pace.shape) < 0.5, pace, 1e-3 * pace)
    beta = rng.uniform(size=lead) if delta else None
    x = Operands(q, k, rng.normal(size=(*lead, VALUES)), -pace, beta)
    return x, rng.normal(size=(ROWS, HEADS, KEYS, VALUES))


def looped(x: Operands, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The reference, head by head."""
    out, end = np.zeros(x.v.shape), np.zeros(state.shape)
    for r, h in itertools.product(range(ROWS), range(HEADS)):
        decay = np.broadcast_to(x.decay[r, :, h], x.k[r, :, h].shape)
        args = (x.q[r, :, h], x.k[r, :, h], x.v[r, :, h], decay)
        if x.beta is None:
            out[r, :, h], end[r, h] = oracle.plain(*args, state[r, h])
        else:
            out[r, :, h], end[r, h] = oracle.delta(*args, x.beta[r, :, h], state[r, h])
    return out, end


KINDS = pytest.mark.parametrize(
    "channels, delta", [(1, False), (1, True), (KEYS, True)], ids=["plain", "delta", "kda"]
)


@KINDS
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-11), ("float32", 2e-5)])
def test_equals_the_loop(channels: int, delta: bool, dtype: str, tolerance: float) -> None:
    with jax.enable_x64(dtype == "float64"):
        for tokens in LENGTHS:
            run = jax.jit(recurrence.chunked, compiler_options=FAST)
            for decay in DECAYS:
                x, state = drawn(tokens, channels, delta, decay)
                ours = jax.tree.map(lambda y: jnp.asarray(y, dtype), (x, state))
                got, want = run(*ours), looped(x, state)
                assert got[0].dtype == got[1].dtype == dtype
                for have, right in zip(got, want, strict=True):
                    scale = 1 + np.abs(right).max()
                    np.testing.assert_allclose(have, right, atol=tolerance * scale, rtol=0)


@KINDS
def test_a_step_is_a_block_of_one(channels: int, delta: bool) -> None:
    x, state = drawn(37, channels, delta, "slow")
    want, end = looped(x, state)
    step, state = jax.jit(recurrence.step, compiler_options=FAST), jnp.asarray(state, jnp.float32)
    for t in range(37):
        one = jax.tree.map(lambda y, t=t: jnp.asarray(y[:, t], jnp.float32), x)
        out, state = step(one, state)
        np.testing.assert_allclose(out, want[:, t], atol=1e-4)
    np.testing.assert_allclose(state, end, atol=1e-4)


@KINDS
def test_tokens_that_do_not_run_leave_no_trace(channels: int, delta: bool) -> None:
    """The state is bit for bit that of the tokens that ran, whatever fills the other columns."""
    x, state = jax.tree.map(
        lambda y: jnp.asarray(y, jnp.float32), drawn(37, channels, delta, "slow")
    )
    count = jnp.array([0, 21])
    runs = jnp.arange(37) < count[:, None]
    run = jax.jit(lambda x, state: recurrence.chunked(x.only(runs), state))
    other = jax.tree.map(lambda y: jnp.where(runs.reshape(ROWS, 37, *[1] * (y.ndim - 2)), y, -3), x)
    (out, end), (_, again) = run(x, state), run(other, state)
    np.testing.assert_array_equal(end, again)
    np.testing.assert_array_equal(end[0], state[0])
    short = jax.tree.map(lambda y: y[:, :21], x)
    want, after = jax.jit(recurrence.chunked)(short, state)
    np.testing.assert_allclose(end[1], after[1], atol=1e-5)
    np.testing.assert_allclose(out[1, :21], want[1], atol=1e-5)


@KINDS
def test_gradients_are_those_of_the_steps(channels: int, delta: bool) -> None:
    x, state = jax.tree.map(
        lambda y: jnp.asarray(y, jnp.float32), drawn(70, channels, delta, "fast")
    )

    def steps(x: Operands, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(state, one):
            out, state = recurrence.step(one, state)
            return state, out

        state, out = jax.lax.scan(body, state, jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), x))
        return jnp.moveaxis(out, 0, 1), state

    def loss(run, x: Operands, state: jax.Array) -> jax.Array:
        out, end = run(x, state)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(end))

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, run), argnums=(0, 1)), compiler_options=FAST)(
            x, state
        )
        for run in (recurrence.chunked, steps)
    )
    for have, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(have).all()
        np.testing.assert_allclose(have, right, atol=2e-4 * (1 + np.abs(right).max()))
