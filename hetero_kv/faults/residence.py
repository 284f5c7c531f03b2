"""Trials on resident state: two rows of a paged cache, one of which goes on after a fault.

With all checks on, calls are those of `models.checked`. With some off the same check runs, and the
bits of those that are off are masked: one program for all of them.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv import snapshot, validate
from hetero_kv.contract import CacheSpec
from hetero_kv.faults import kinds, resident
from hetero_kv.faults.forge import Held, Material
from hetero_kv.faults.kinds import Case
from hetero_kv.pages import cache as paged
from hetero_kv.pages import slot_sums
from hetero_kv.pages.layout import history_slots
from hetero_kv.pages.validate import Expected, check, expect
from hetero_kv.params import Params
from hetero_kv.state import Cache
from hetero_kv.validate import Verdict

BITS = {
    kinds.EVIDENCE: validate.COUNT | validate.POSITIONS | validate.LENGTH,
    kinds.FORM: validate.MISSING | validate.WRITE,
    kinds.RECYCLED: validate.GENERATION,
    kinds.OWNER: validate.OWNER,
    kinds.VALID: validate.VALID,
}
ROW, MATE = 0, 1


def code_of(bit: str) -> str:
    """The code of a reason that is a bit of a verdict; those of evidence have one in common."""
    return "evidence" if validate.BITS[bit] & BITS[kinds.EVIDENCE] else bit


class Model(Protocol):
    """What a trial needs of a model, see `models.decoder.Decoder`."""

    cache_spec: CacheSpec

    def init_paged_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache."""

    def prefill(self, params: Params, tokens, cache: Cache, valid=None, logits="all"):
        """Logits and the cache."""

    def checked_step(self, params: Params, token, cache: Cache, expected, active=None):
        """Logits, the cache and the verdict."""

    def checked_prefill(self, params: Params, tokens, cache: Cache, expected, valid=None):
        """Logits, the cache and the verdict."""


class Told(NamedTuple):
    """How a row went on. reasons: codes with the component; then the answer is the cold run's."""

    reasons: tuple[str, ...]
    logits: np.ndarray  # f32[outputs, V]
    mate: bool  # whether the other row got what it should


class Residence:
    """Two rows at `length` tokens, in pages that are sealed and leased.

    Args:
        prompt, donor: i32[n] of the two rows. outputs: steps to compare.
        material: faults are made of it, but for what the two rows themselves hold.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        prompt: np.ndarray,
        donor: np.ndarray,
        length: int,
        outputs: int,
        material: Material,
    ):
        spec = model.cache_spec
        self.model, self.params, self.spec, self.length = model, params, spec, length
        capacity = max(length + outputs + 1, len(prompt))
        cache = model.init_paged_cache(2, capacity)
        self._jitted = _compiled(model)
        for tokens in (length // 2, capacity):  # in turns, so that no row's pages are in sequence
            for row in (MATE, ROW):
                cache, flags = self._jitted.reserve(
                    cache, row, tokens, np.array([row + 1, 77], np.uint32)
                )
                _succeeded("reserve", flags)
        both = np.stack([prompt, donor]).astype(np.int32)
        _, cache = model.prefill(params, both[:, :length], cache, logits="none")
        for row in (ROW, MATE):
            cache, flags = self._jitted.seal(cache, row, _keys(cache, row))
            _succeeded("seal", flags)
        self.base = cache
        self.expected: Expected = self._jitted.expect(cache)
        self._sums = self._jitted.sums(cache)
        target, other = (
            Held(length, snapshot.take_leaves(spec, cache, length, x)) for x in (ROW, MATE)
        )
        self.material = dataclasses.replace(material, target=target, donor=other)
        self.tokens, self.right = self._right(both, outputs)

    def run(self, case: Case, off: Iterable[str]) -> Told:
        """The row goes on under a fault, with some checks switched off."""
        off = frozenset(off)
        cache = resident.damage(self.spec, case, self.material, _copy(self.base), ROW, MATE)
        reasons = self._first_look(cache, off)
        if not off:
            reasons += self._prefill_refuses(cache)
        if reasons and off:
            return Told(reasons, self.right[:, ROW], True)
        logits, more = self._steps(cache, off)
        mate = _same(logits[:, MATE], self.right[: len(logits), MATE])
        if reasons or more:  # the answer is the cold run's
            found = tuple(dict.fromkeys((*reasons, *more)))
            return Told(found, self.right[:, ROW], mate)
        return Told((), logits[:, ROW], mate)

    # -- inside ------------------------------------------------------------------------------------

    def _right(self, both: np.ndarray, outputs: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that are fed i32[outputs, 2], and right logits f32[outputs, 2, V]."""
        cache, fed, out = _copy(self.base), [], []
        for i in range(outputs):
            at = self.length + i
            token = both[:, at] if at < both.shape[1] else out[-1].argmax(-1).astype(np.int32)
            logits, cache, verdict = self.model.checked_step(
                self.params, token, cache, self.expected, np.ones(2, bool)
            )
            if not np.asarray(verdict.ok).all():
                raise RuntimeError(f"refused without a fault: {self._reasons(verdict, 0)}")
            fed.append(token)
            out.append(np.asarray(logits))
        return np.stack(fed), np.stack(out)

    def _first_look(self, cache: Cache, off: frozenset[str]) -> tuple[str, ...]:
        """Checksums, where a row goes on."""
        pages, state = self._jitted.goes_on(cache, self.expected, self._sums)
        found: tuple[str, ...] = ()
        for name, bits in ((kinds.PAGE_BYTES, pages), (kinds.SLOT_BYTES, state)):
            if name not in off:
                found += self._reasons(Verdict(np.asarray(bits), None), ROW)
        return found

    def _prefill_refuses(self, cache: Cache) -> tuple[str, ...]:
        """What a call for several tokens finds; it must refuse what a step refuses."""
        tokens = self.tokens[:2].T
        _, _, verdict = self.model.checked_prefill(
            self.params, tokens, _copy(cache), self.expected, np.array([2, 0])
        )
        return self._reasons(verdict, ROW)

    def _steps(self, cache: Cache, off: frozenset[str]) -> tuple[np.ndarray, tuple[str, ...]]:
        """Logits f32[steps, 2, V], and the reasons of a refusal, which ends the steps."""
        mask = np.uint32(0)
        for name, bits in BITS.items():
            mask |= np.uint32(0 if name in off else bits)
        out, active = [], np.ones(2, bool)
        for token in self.tokens:
            if off:
                logits, cache, verdict = self._jitted.masked(
                    self.params, cache, token, self.expected, mask
                )
            else:
                logits, cache, verdict = self.model.checked_step(
                    self.params, token, cache, self.expected, active
                )
            out.append(np.asarray(logits))
            if not np.asarray(verdict.ok)[ROW]:
                return np.stack(out), self._reasons(verdict, ROW)
        return np.stack(out), ()

    def _reasons(self, verdict: Verdict, row: int) -> tuple[str, ...]:
        """code: component, of one row."""
        found = []
        for text in validate.describe(self.spec, verdict, row):
            component, bit = text.rsplit(": ", 1)
            code = code_of(bit)
            if code != "joint":
                found.append(f"{code}: {component}")
        return tuple(dict.fromkeys(found))


class _Compiled:
    """The compiled functions of one model."""

    def __init__(self, model: Model):
        self.model, self.spec = model, model.cache_spec
        self.reserve, self.expect = jax.jit(paged.reserve), jax.jit(expect)
        self.seal = jax.jit(functools.partial(paged.seal, self.spec))
        self.sums = jax.jit(functools.partial(slot_sums.sums, self.spec))
        self.goes_on = jax.jit(self._traced_goes_on)
        self.masked = jax.jit(self._traced_masked, donate_argnums=1)

    def _traced_goes_on(
        self, cache: Cache, expected: Expected, sums: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Bits CHECKSUM u32[R, C] of pages, sealed and open, and of slots."""
        sealed = check(self.spec, cache, expected, sealed=True).bits & validate.CHECKSUM
        others = slot_sums.changed(self.spec, cache, sums).bits
        history = history_slots(self.spec)
        paged = jnp.array([name in history for name in validate.components(self.spec)])
        return sealed | jnp.where(paged, others, 0), jnp.where(paged, 0, others)

    def _traced_masked(
        self, params: Params, cache: Cache, token: jax.Array, expected: Expected, mask: jax.Array
    ) -> tuple[jax.Array, Cache, Verdict]:
        """`models.checked` with some bits that count for nothing."""
        bits = check(self.spec, cache, expected, 1).bits & mask
        ok = jnp.all(bits == 0, axis=-1)
        logits, cache = self.model.stack.step(params, token, cache, ok, verified=True)
        return logits, cache, Verdict(bits, ok)


_compiled = functools.lru_cache(maxsize=8)(_Compiled)


def _keys(cache: Cache, row: int) -> dict[str, np.ndarray]:
    """Short keys of the prefixes that the pages of a row end."""
    return {
        page.component: np.array([[row + 1, 1000 + x] for x in range(page.columns)], np.uint32)
        for page in cache.pages.paging.pages
    }


def _succeeded(call: str, flags: jax.Array) -> None:
    if int(flags):
        raise RuntimeError(f"{call} has failed without a fault: flags {int(flags)}")


def _copy(cache: Cache) -> Cache:
    return jax.tree.map(jnp.copy, cache)


def _same(one: np.ndarray, two: np.ndarray) -> bool:
    return one.tobytes() == two.tobytes()
