"""Times decode steps on a contiguous cache, on pages, and on pages with validators inside.

python -m experiments.paging_cost
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import models
from experiments.bench import bench_config, timing, weights
from hetero_kv.contract import History
from hetero_kv.pages import cache as paged
from hetero_kv.pages import validate
from hetero_kv.pages.layout import Paging
from hetero_kv.params import Params
from hetero_kv.prefix import transfer_pages
from hetero_kv.state import Cache
from models import Decoder

ARMS = ("contiguous", "paged", "checked")
Step = Callable[[Cache], tuple]


def measure_paging(
    model: Decoder,
    params: Params,
    *,
    rows: int = 8,
    length: int = 1_500,
    capacity: int = 2_048,
    span: int | None = None,
    steps: int = 16,
    repeats: int = 15,
    seconds: float = 120.0,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Seconds per step of each of ARMS, one number per round, taken in turns.

    Every step waits for its logits; "checked" also reads its verdict on the host, and compares with
    a lease. Caches hold random rows with true evidence. span: tokens of a page, default the block.
    """
    token = jnp.zeros(rows, jnp.int32)
    active = jnp.ones(rows, bool)
    rows_cache = weights.filled_cache(model, rows, length, capacity, seed)
    pages_cache = _in_pages(model, rows_cache, Paging.of(model.cache_spec, rows, capacity, span))
    expected = jax.jit(validate.expect)(pages_cache)

    def plain(cache: Cache) -> tuple:
        return model.decode_step(params, token, cache, active)

    def checked(cache: Cache) -> tuple:
        logits, cache, verdict = model.checked_step(params, token, cache, expected, active)
        if not np.asarray(verdict.ok).all():
            raise RuntimeError("a row of the benchmark was refused")
        return logits, cache

    def block(start: Cache, step: Step) -> float:
        cache = jax.block_until_ready(jax.tree.map(jnp.copy, start))
        began = time.perf_counter()
        for _ in range(steps):
            logits, cache = step(cache)
            jax.block_until_ready(logits)
        return (time.perf_counter() - began) / steps

    blocks = {
        "contiguous": functools.partial(block, rows_cache, plain),
        "paged": functools.partial(block, pages_cache, plain),
        "checked": functools.partial(block, pages_cache, checked),
    }
    return timing.in_turns(blocks, repeats=repeats, least_repeats=3, seconds=seconds)


def _in_pages(model: Decoder, cache: Cache, paging: Paging) -> Cache:
    """The same state in pages, rows after rows."""
    made = model.init_paged_cache(cache.batch, cache.capacity, paging)
    reserve, counted = jax.jit(paged.reserve), jax.jit(transfer_pages.counted)
    for row in range(cache.batch):
        owner = jnp.array([row + 1, 1], jnp.uint32)
        made, flags = reserve(made, row, cache.capacity, owner)
        if int(flags):
            raise RuntimeError(f"no pages for row {row}: flags {int(flags)}")
        made = counted(made, row, cache.length[row])
    leaves = {}
    for slot in model.cache_spec.slots():
        leaf = cache.leaf(slot)
        if isinstance(slot.leaf.contract, History):
            page = paging.page(slot.leaf.component)
            pool, held = made.leaf(slot), page.pages_for(cache.capacity)
            table = made.pages.tables[page.component].table[:, :held]
            part = leaf[:, :, : held * page.entries]
            part = part.reshape(*part.shape[:2], held, page.entries, *slot.leaf.width)
            leaf = pool.at[:, table].set(part)
        leaves[slot] = leaf
    return made.with_leaves(leaves).replace(length=cache.length, grid_length=cache.grid_length)


def main() -> None:
    """Prints the medians of the 5M-parameter model at 8 rows, for two sizes of pages."""
    model = models.build(bench_config.medium().in_layout("unstacked"))
    params = model.prepare(model.init(jax.random.key(0)))
    for span in (None, 256):
        times = measure_paging(model, params, span=span)
        contiguous, plain, checked = (np.array(times[name]) for name in ARMS)
        print(
            f"pages of {span or model.cache_spec.block} tokens: contiguous "
            f"{1e3 * np.median(contiguous):.2f} ms, paged {np.median(plain / contiguous):.3f}x, "
            f"validation {100 * np.median(checked / plain - 1):+.1f} %"
        )


if __name__ == "__main__":
    main()
