"""The static-graph guard: one compile per function and bucket (DESIGN rule 5), counted."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax

Key = tuple[str, str]  # (function, bucket)


class LeakedShape(AssertionError):
    """A function was traced again for a bucket that it had been compiled for already."""


class Guard:
    """Counts traces of the functions that it wraps, by the bucket that each call declares.

    A bucket names everything that may decide a shape. A second trace of one bucket means that
    something else did: a length, a validity, a batch mate. Every compile follows a trace.

    strict: such a trace raises LeakedShape, before anything is compiled.
    """

    def __init__(self, strict: bool = False):
        self.strict = strict
        self.counts: collections.Counter[Key] = collections.Counter()

    def jit(
        self, name: str, function: Callable, bucket: Callable[..., str], **options: Any
    ) -> Callable:
        """`jax.jit(function, **options)`; `bucket` is called with the arguments of each call."""
        keys: list[Key] = []

        @functools.wraps(function)
        def traced(*args: Any) -> Any:
            self._count(keys[-1])
            try:
                return function(*args)
            except BaseException:  # nothing will be compiled, and the next call traces again
                self.counts[keys[-1]] -= 1
                raise

        compiled = jax.jit(traced, **options)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            keys.append((name, bucket(*args)))
            try:
                return compiled(*args)
            finally:
                keys.pop()

        return call

    @property
    def leaks(self) -> dict[Key, int]:
        """Functions and buckets that were traced more than once, and how often."""
        return {key: count for key, count in self.counts.items() if count > 1}

    def _count(self, key: Key) -> None:
        self.counts[key] += 1
        if self.strict and self.counts[key] > 1:
            name, bucket = key
            raise LeakedShape(
                f"{name} was traced {self.counts[key]} times for bucket {bucket!r}: a shape, dtype "
                "or static value depends on something that the bucket does not name"
            )
