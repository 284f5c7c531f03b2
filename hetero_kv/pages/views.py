"""What attention sees of a paged cache during one call, and what the call leaves in the tables.

Block tables are looked up once per call, not per layer. A row whose pages do not suffice for the
call is refused as a whole beforehand, so within a call no write is ever dropped in part.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.attention.pool import Paged
from hetero_kv.contract import History, LayerSpec
from hetero_kv.packing import Packed
from hetero_kv.pages import table
from hetero_kv.pages.cache import pages_for
from hetero_kv.state import Cache, LayerLeaves

Tables = dict[str, tuple[jax.Array, jax.Array]]  # per component: i32[R, n] to read, and to write


def tables(cache: Cache) -> Tables:
    """The block tables of a call; none for a contiguous cache."""
    if cache.pages is None:
        return {}
    owner = cache.pages.owner
    return {
        name: (x.safe(x.table), table.writable(x, owner)) for name, x in cache.pages.tables.items()
    }


def wrap(leaves: LayerLeaves, spec: LayerSpec, found: Tables) -> dict:
    """The leaves of one layer as attention reads them: pools as `Paged`, bytes as `Packed`."""
    wrapped: dict = dict(leaves)
    for name, leaf in spec.leaves:
        if found and isinstance(leaf.contract, History):
            wrapped[name] = Paged(leaves[name], *found[leaf.component])
        if leaf.packing is not None:
            wrapped[name] = Packed(wrapped[name], leaf.packing)
    return wrapped


def unwrap(leaves: dict) -> LayerLeaves:
    """The arrays again."""
    stored = {name: x.rows if isinstance(x, Packed) else x for name, x in leaves.items()}
    return {name: x.pages if isinstance(x, Paged) else x for name, x in stored.items()}


def suffices(
    cache: Cache, start: jax.Array, stop: jax.Array, found: Tables | None = None
) -> jax.Array:
    """bool[R]: whether rows can go from i32[R] `start` to `stop` tokens on the pages they have.

    Pages up to `start` must be readable, those of new entries writable. True without pages.
    """
    ok = jnp.ones(cache.length.shape, bool)
    if cache.pages is None:
        return ok
    found = tables(cache) if found is None else found
    for name, pages in cache.pages.tables.items():
        page = cache.pages.paging.page(name)
        column = jnp.arange(page.columns, dtype=jnp.int32)
        before, after = page.contract.count(start), page.contract.count(stop)
        readable = _readable(pages, pages.table)
        missing = ~readable & (column < pages_for(page, start)[:, None])
        new = (column >= (before // page.entries)[:, None]) & (after > before)[:, None]
        new &= column < pages_for(page, stop)[:, None]
        missing |= new & (found[name][1] >= pages.size)
        ok &= ~jnp.any(missing, axis=1)
    return ok


_suffices = jax.jit(suffices)


def check_suffices(cache: Cache, tokens: np.ndarray) -> None:
    """Raises ValueError where a row's pages are too few for `tokens` more tokens (host side)."""
    if cache.pages is None or not np.any(tokens):
        return
    more = np.broadcast_to(np.asarray(tokens, np.int32), (cache.batch,))
    ok = np.asarray(_suffices(cache, cache.length, cache.length + more)) | (more == 0)
    if not ok.all():
        raise ValueError(
            f"rows {np.flatnonzero(~ok).tolist()} have too few writable pages for "
            f"{more[~ok].tolist()} more tokens; reserve them first"
        )


def check_holds(cache: Cache, length: int, rows: np.ndarray) -> None:
    """Raises ValueError where rows bool[R] have no pages of `length` tokens to read (host side).

    In a trace nothing can be raised: such a row is then refused by the call itself.
    """
    if cache.pages is None or isinstance(cache.length, jax.core.Tracer):
        return
    stop = jnp.full(cache.length.shape, length, jnp.int32)
    ok = np.asarray(_suffices(cache, stop, stop)) | ~rows
    if not ok.all():
        raise ValueError(
            f"rows {np.flatnonzero(~ok).tolist()} do not hold the History of {length} tokens"
        )


def wrote(cache: Cache, start: jax.Array, stop: jax.Array, most: int, found: Tables) -> Cache:
    """Notes in the page tables that rows went from `start` to `stop`, by `most` tokens at most."""
    if cache.pages is None:
        return cache
    new = {}
    for name, pages in cache.pages.tables.items():
        page = cache.pages.paging.page(name)
        before, after = page.contract.count(start), page.contract.count(stop)
        columns = min(page.columns, most // page.contract.stride // page.entries + 2)
        column = (before // page.entries)[:, None] + jnp.arange(columns, dtype=jnp.int32)
        held = jnp.clip(after[:, None] - column * page.entries, 0, page.entries)
        ids = jnp.take_along_axis(
            found[name][1], column, axis=1, mode="fill", fill_value=pages.size
        )
        ids = jnp.where((held > 0) & (after > before)[:, None], ids, pages.size)
        new[name] = pages._replace(count=pages.count.at[ids].set(held, mode="drop"))
    return cache.replace(pages=cache.pages.replace(tables=new))


def _readable(pages: table.PageTable, ids: jax.Array) -> jax.Array:
    form = pages.column("form", ids)
    return (form == table.WRITING) | (form == table.COMPLETE)
