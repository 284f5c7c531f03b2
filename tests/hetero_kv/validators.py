"""Validators in one program each: without, every operation on a cache is a program of its own."""

import functools

import jax

from hetero_kv import validate
from hetero_kv.contract import CacheSpec
from hetero_kv.pages import cache as paged
from hetero_kv.pages import validate as at_use

ledgers = jax.jit(paged.ledgers)
expect = jax.jit(at_use.expect)


@functools.partial(jax.jit, static_argnames=("spec", "finite"))
def evidence(spec: CacheSpec, cache, rows=None, finite: bool = False) -> validate.Verdict:
    """`validate.evidence`."""
    return validate.evidence(spec, cache, rows, finite)


@functools.partial(jax.jit, static_argnames=("spec", "finite"))
def check(spec: CacheSpec, cache, expected=None, count=0, finite: bool = False):
    """`pages.validate.check`."""
    return at_use.check(spec, cache, expected, count, finite=finite)
