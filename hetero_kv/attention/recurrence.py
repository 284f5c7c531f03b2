"""Linear recurrences of a matrix per head, in blocks of tokens that run in parallel.

    S_t = diag(exp(a_t)) S_{t-1} + k_t u_t^T,    o_t = S_t^T q_t

with `u_t = v_t` (Mamba-2, arXiv 2405.21060; lightning attention, arXiv 2401.04658), or by the delta
rule `u_t = b_t (v_t - (diag(exp(a_t)) S_{t-1})^T k_t)` (gated DeltaNet, arXiv 2412.06464; with a
decay per channel Kimi Delta Attention, arXiv 2510.26692). Inside a block the delta rule is a unit
lower triangular system. Decays between two tokens are sums over the tokens between them, never
differences of sums from the block's start: those cancel, and their quotients overflow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 64  # tokens of a block where all channels of a head decay alike
BLOCK_OF_CHANNELS = 16  # where each has a decay of its own: the work grows with block x channels
EXACT = jax.lax.Precision.HIGHEST


class Operands(NamedTuple):
    """What tokens do to the state; lead axes [R, S, H], or [R, H] for one token.

    All are of the state's dtype.
    """

    q: jax.Array  # [..., K]
    k: jax.Array  # [..., K]
    v: jax.Array  # [..., V]
    decay: jax.Array  # [..., 1 or K], logarithm: <= 0
    beta: jax.Array | None = None  # [...], strength of the delta rule; None: u = v

    def only(self, runs: jax.Array) -> "Operands":
        """Tokens where bool[R, S] `runs` is False leave the state as it is."""
        runs = runs[..., None, None]
        return self._replace(
            k=jnp.where(runs, self.k, 0), v=jnp.where(runs, self.v, 0), decay=self.decay * runs
        )


def step(x: Operands, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token after state [R, H, K, V]: (o [R, H, V], the state after it)."""
    state = jnp.exp(x.decay)[..., None] * state
    u = x.v
    if x.beta is not None:
        u = x.beta[..., None] * (u - _read(x.k, state))
    state = state + x.k[..., None] * u[..., None, :]
    return _read(x.q, state), state


def chunked(x: Operands, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """S tokens after state [R, H, K, V]: (o [R, S, H, V], the state after them)."""
    tokens = x.q.shape[1]
    size = min(tokens, BLOCK if x.decay.shape[-1] == 1 else BLOCK_OF_CHANNELS)
    blocks = -(-tokens // size)

    def cut(y: jax.Array) -> jax.Array:
        """[R, S, H, ...] to [blocks, R, H, size, ...]; tokens that fill up do nothing."""
        y = jnp.pad(y, ((0, 0), (0, blocks * size - tokens)) + ((0, 0),) * (y.ndim - 2))
        y = y.reshape(y.shape[0], blocks, size, *y.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(y, 1, 0), 3, 2)

    parts = jax.tree.map(cut, x)
    if blocks == 1:
        out, state = _block(jax.tree.map(lambda y: y[0], parts), state)
        return jnp.moveaxis(out, 2, 1), state

    def body(state: jax.Array, part: Operands) -> tuple[jax.Array, jax.Array]:
        out, state = _block(part, state)
        return state, out

    state, out = jax.lax.scan(body, state, parts)
    out = jnp.moveaxis(jnp.moveaxis(out, 3, 2), 0, 1)  # [R, blocks, size, H, V]
    return out.reshape(out.shape[0], blocks * size, *out.shape[3:])[:, :tokens], state


def _block(x: Operands, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One block; leaves [R, H, C, ...]."""
    tokens = x.q.shape[-2]
    row = jnp.arange(tokens)
    after = row[:, None] > row
    # gaps[i, j]: the decays of tokens j + 1 .. i.
    gaps = jnp.where(after[..., None], x.decay[..., :, None, :], 0)
    gaps = jnp.cumsum(gaps, axis=-3)
    fade = jnp.exp(jnp.where((row[:, None] >= row)[..., None], gaps, -jnp.inf))
    since = jnp.exp(jnp.cumsum(x.decay, axis=-2))  # from before the block

    def pairs(a: jax.Array) -> jax.Array:
        """[..., C, C]: a_i . k_j under the decays between them, 0 for j > i."""
        if fade.shape[-1] == 1:
            return _dot("...ik,...jk->...ij", a, x.k) * fade[..., 0]
        return jnp.sum(a[..., :, None, :] * x.k[..., None, :, :] * fade, axis=-1)

    u = x.v
    if x.beta is not None:
        beta = x.beta[..., None]
        u = beta * (u - _dot("...ck,...kv->...cv", x.k * since, state))
        lower = jnp.where(after, beta * pairs(x.k), 0)
        u = jax.lax.linalg.triangular_solve(
            lower, u, left_side=True, lower=True, unit_diagonal=True
        )
    out = _dot("...ck,...kv->...cv", x.q * since, state)
    out = out + _dot("...ij,...jv->...iv", pairs(x.q), u)
    state = since[..., -1, :, None] * state
    return out, state + _dot("...ck,...cv->...kv", x.k * fade[..., -1, :, :], u)


def _read(x: jax.Array, state: jax.Array) -> jax.Array:
    return _dot("...k,...kv->...v", x, state)


def _dot(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(form, a, b, precision=EXACT)
