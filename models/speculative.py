"""Verifying drafted tokens, and accepting some of them: a cache that can be rewound a little.

A draft runs in one call. To accept fewer tokens than were drafted, what was copied before goes back
(`pages.rewind`), and the call is repeated for the accepted tokens alone. So no ring needs extra
rows, and rejected tokens leave no trace.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.contract import CacheSpec
from hetero_kv.pages import rewind, views
from hetero_kv.pages.rewind import Mark
from hetero_kv.params import Params
from hetero_kv.state import Cache

if TYPE_CHECKING:
    from models.stack import Stack


@dataclasses.dataclass(eq=False)
class Draft:
    """Drafted tokens of R rows that have run, until some of them are accepted.

    tokens: i32[R, columns], padded. count: i64[R], how many ran. before: the rows as they were.
    """

    tokens: np.ndarray
    count: np.ndarray
    cache: Cache | None
    before: Mark


class Drafts:
    """Compiled functions of one model."""

    def __init__(self, model: object):
        self._stack: Stack = model.stack
        self._sizes: tuple[int, ...] = model.call_sizes
        self._budget: int = model.rewind_budget
        self._spec: CacheSpec = model.cache_spec
        self._verify = jax.jit(self._traced_verify, donate_argnums=3)
        self._accept = jax.jit(self._traced_accept, donate_argnums=3)

    def verify(
        self, params: Params, tokens: np.ndarray, cache: Cache, active: np.ndarray | None
    ) -> tuple[jax.Array, Draft]:
        """See `Decoder.verify`."""
        tokens = np.asarray(tokens, np.int32)
        rows, size = tokens.shape
        if not 1 <= size <= self._budget:
            raise ValueError(
                f"a draft has 1..{self._budget} tokens (the rewind budget), got {size}: draft "
                "fewer, or use a larger chunk"
            )
        active = np.ones(rows, bool) if active is None else np.asarray(active, bool)
        count = np.where(active, size, 0)
        length = np.asarray(cache.length)
        if (length + count > cache.capacity).any():
            raise ValueError(f"{length} + {count} drafted tokens > capacity {cache.capacity}")
        views.check_suffices(cache, count)
        columns = next(x for x in self._sizes if x >= size)
        tokens = np.pad(tokens, ((0, 0), (0, columns - size)))
        params = self._stack.weights(params, tokens.size)
        logits, cache, before = self._verify(params, tokens, count.astype(np.int32), cache)
        return logits[:, :size], Draft(tokens, count, cache, before)

    def accept(self, params: Params, draft: Draft, count: np.ndarray) -> Cache:
        """See `Decoder.accept`."""
        count = np.asarray(count)
        if count.shape != draft.count.shape or (count < 0).any() or (count > draft.count).any():
            raise ValueError(f"accepted {count} of {draft.count} drafted tokens")
        if draft.cache is None:
            raise ValueError("tokens of this draft were accepted already")
        cache, draft.cache = draft.cache, None
        if (count == draft.count).all():
            return cache
        params = self._stack.weights(params, draft.tokens.size)
        return self._accept(params, draft.tokens, count.astype(np.int32), cache, draft.before)

    # -- traced ----------------------------------------------------------------------------------

    def _traced_verify(self, params, tokens, count, cache):
        before = rewind.mark(self._spec, cache)
        logits, cache = self._run(params, tokens, count, cache, "all")
        return logits, cache, before

    def _traced_accept(self, params, tokens, count, cache, before):
        cache = rewind.back(self._spec, cache, before)
        return self._run(params, tokens, count, cache, "none")[1]

    def _run(self, params, tokens, count, cache, logits: str):
        """One call; what it makes is never exact, wherever it lies on the chunk grid."""
        first = jnp.zeros(cache.batch, jnp.int32)
        grid_length = cache.grid_length
        out, cache = self._stack.call(params, tokens, count, cache, first, logits, replay=False)
        return out, cache.replace(grid_length=grid_length)
