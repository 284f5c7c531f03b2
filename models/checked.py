"""Calls of the decoder with validators inside: refused rows write nothing (DESIGN rules 5, 10)."""

import functools

import jax
import jax.numpy as jnp

from hetero_kv import validate
from hetero_kv.contract import CacheSpec
from hetero_kv.pages.validate import Expected, check
from hetero_kv.params import Params
from hetero_kv.state import Cache
from hetero_kv.validate import Verdict
from models.stack import Stack


class Checked:
    """The jitted checked calls of one decoder."""

    def __init__(self, stack: Stack, spec: CacheSpec):
        self.stack, self.spec = stack, spec
        self.step = jax.jit(self._step, donate_argnames=("cache",))
        self.call = jax.jit(self._call, static_argnames=("logits",), donate_argnames=("cache",))

    def run(self, params: Params, expected: Expected | None, cache: Cache) -> "Run":
        """What `pieces.drive` runs for a checked prefill of `cache`."""
        names = validate.components(self.spec)
        clean = jnp.zeros((cache.batch, len(names)), jnp.uint32)
        return Run(self, params, expected, Verdict(clean, jnp.ones(cache.batch, bool)))

    def _step(
        self,
        params: Params,
        token: jax.Array,
        cache: Cache,
        expected: Expected | None,
        active: jax.Array | None,
    ) -> tuple[jax.Array, Cache, Verdict]:
        verdict = check(self.spec, cache, expected, 1, active)
        fits = cache.length < cache.capacity
        verdict = _full(verdict, ~fits if active is None else active & ~fits)
        runs = verdict.ok if active is None else verdict.ok & active
        logits, cache = self.stack.step(params, token, cache, runs, verified=True)
        return jnp.where(verdict.ok[:, None], logits, jnp.nan), cache, verdict

    def _call(
        self,
        params: Params,
        tokens: jax.Array,
        count: jax.Array,
        cache: Cache,
        first: jax.Array,
        expected: Expected | None,
        before: Verdict,
        logits: str,
    ) -> tuple[jax.Array, Cache, Verdict]:
        runs = (count > 0) & before.ok
        verdict = check(self.spec, cache, expected, count, runs)
        verdict = _full(verdict, runs & (cache.length + count > cache.capacity))
        verdict = Verdict(before.bits | verdict.bits, before.ok & verdict.ok)
        some = jnp.where(verdict.ok, count, 0)
        out, cache = self.stack.call(
            params, tokens, some, cache, first, logits, False, verified=True
        )
        ok = verdict.ok.reshape((-1,) + (1,) * (out.ndim - 1))
        return jnp.where(ok, out, jnp.nan), cache, verdict


class Run:
    """Runs the pieces of one prefill, and adds up their verdicts."""

    def __init__(
        self, checked: Checked, params: Params, expected: Expected | None, verdict: Verdict
    ):
        self._call = functools.partial(checked.call, params)
        self._expected = expected
        self.verdict = verdict

    def __call__(
        self, tokens: jax.Array, count: jax.Array, cache: Cache, first: jax.Array, logits: str
    ) -> tuple[jax.Array, Cache]:
        """One piece."""
        out, cache, verdict = self._call(
            tokens, count, cache, first, self._expected, self.verdict, logits=logits
        )
        if not isinstance(verdict.ok, jax.core.Tracer):  # `drive` also asks for shapes alone
            self.verdict = verdict
        return out, cache


def _full(verdict: Verdict, full: jax.Array) -> Verdict:
    """Rows without room for one more token have a wrong length to go on from."""
    bits = verdict.bits.at[:, -1].set(verdict.bits[:, -1] | validate.bit(full, validate.LENGTH))
    return Verdict(bits, verdict.ok & ~full)
