"""What the cost of safety is measured on: decode calls, an engine at work, a warm request."""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import timing, weights
from experiments.safety_config import SafetyConfig
from hetero_kv import Engine, Options, PrefixStore, Request, Sampling, sampling
from hetero_kv.calls import Ask
from hetero_kv.contract import History
from hetero_kv.pages import cache as paged
from hetero_kv.pages import entries
from hetero_kv.pages import validate as at_use
from hetero_kv.pages.layout import Paging
from hetero_kv.params import Params
from hetero_kv.prefix.identity import Identity
from hetero_kv.requests import TOKEN
from hetero_kv.rows import Rows
from hetero_kv.state import Cache
from models import Decoder

Samples = dict[str, list[float]]
BARE, CONTIGUOUS, PAGED, UNCHECKED = "bare scan", "contiguous", "paged", "paged, unchecked"


def in_pages(model: Decoder, cache: Cache, paging: Paging) -> Cache:
    """The same state in pages, rows after rows."""
    made = model.init_paged_cache(cache.batch, cache.capacity, paging)
    reserve, counted = jax.jit(paged.reserve), jax.jit(entries.counted)
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


def step_times(config: SafetyConfig, model: Decoder, params: Params, span: int) -> Samples:
    """Seconds of one decode call of one step for all rows, until the host has read what it told.

    Arms: rows of a contiguous cache and pages, each without and with validators in the call. Only
    with them is the verdict read. Rows are random, with true evidence.
    """
    rows_cache = weights.filled_cache(
        model, config.rows, config.length, config.capacity, config.seed
    )
    paging = Paging.of(model.cache_spec, config.rows, config.capacity, span or None)
    pages_cache = in_pages(model, rows_cache, paging)
    expected = jax.device_get(jax.jit(at_use.expect)(pages_cache))
    blocks: dict[str, Callable[[], float]] = {}
    for name, cache, some in ((CONTIGUOUS, rows_cache, None), (PAGED, pages_cache, paging)):
        for check in (False, True):
            rows = Rows(
                model,
                slots=config.rows,
                capacity=config.capacity,
                burst=1,
                check=check,
                paging=some,
            )
            label = name if check else f"{name}, unchecked"
            lease = expected if some and check else None
            blocks[label] = functools.partial(_steps, config, rows, params, cache, lease)
    return timing.in_turns(blocks, repeats=config.repeats, least_repeats=3, seconds=config.seconds)


def _steps(
    config: SafetyConfig,
    rows: Rows,
    params: Params,
    start: Cache,
    expected: at_use.Expected | None,
) -> float:
    cache = jax.block_until_ready(jax.tree.map(jnp.copy, start))
    size = config.rows
    ask = Ask(
        length=np.full(size, config.length, np.int32),
        token=np.zeros(size, np.int32),
        index=np.zeros(size, np.int32),
        budget=np.ones(size, np.int32),
        check=np.ones(size, bool),
        forced=np.zeros((size, 1), np.int32),
        known=np.zeros(size, np.int32),
        stops=np.full((size, rows.max_stops), -1, np.int32),
        choice=sampling.stack([Sampling()] * size),
        expected=expected,
    )
    began = time.perf_counter()
    for i in range(config.steps):
        told, cache = rows.decode(params, cache, ask._replace(length=ask.length + i), 1)
        told = jax.device_get(told if rows.check else told._replace(bits=np.zeros(0)))
        if rows.check and told.bits.any():
            raise RuntimeError("a row of the benchmark was refused")
        if not told.ran.all():
            raise RuntimeError("a row of the benchmark did not move")
    return (time.perf_counter() - began) / config.steps


def rate_times(config: SafetyConfig, model: Decoder, params: Params) -> Samples:
    """Seconds per token of every row: engines at work, and a bare scan of `decode_step`.

    All start at the same length, and go on from turn to turn.
    """
    turns = min(config.repeats, (config.capacity - config.length - 1) // config.steps - 1)
    rng = np.random.default_rng(config.seed)
    shape = (config.rows, config.length)
    prompts = rng.integers(0, model.config.vocab_size, shape).astype(np.int32)
    paging = Paging.of(model.cache_spec, config.rows, config.capacity)
    blocks: dict[str, Callable[[], float]] = {BARE: _Scan(config, model, params)}
    for name, some in ((CONTIGUOUS, None), (PAGED, paging)):
        blocks[name] = _Work(config, model, params, prompts, some)
    return timing.in_turns(blocks, repeats=turns, least_repeats=3, seconds=config.seconds)


class _Scan:
    """The scan, from where it stood."""

    def __init__(self, config: SafetyConfig, model: Decoder, params: Params):
        self._steps, self._model, self._params = config.steps, model, params
        self._token = np.zeros(config.rows, np.int32)
        sizes = config.rows, config.length, config.capacity, config.seed
        self._cache = weights.filled_cache(model, *sizes)

    def __call__(self) -> float:
        began = time.perf_counter()
        tokens, self._cache = self._model.decode_many(
            self._params, self._token, self._cache, self._steps
        )
        self._token = np.asarray(tokens)[:, -1]
        return (time.perf_counter() - began) / self._steps


class _Work:
    """An engine with a request in every slot, each of them decoding."""

    def __init__(
        self,
        config: SafetyConfig,
        model: Decoder,
        params: Params,
        prompts: np.ndarray,
        paging: Paging | None,
    ):
        self._tokens = config.steps * config.rows
        self._engine = Engine(
            model,
            params,
            slots=config.rows,
            capacity=config.capacity,
            reuse="off",
            options=Options(paging=paging, burst=config.burst),
        )
        for prompt in prompts:
            self._engine.submit(Request(prompt, config.capacity - config.length))
        while len(self._engine.scheduler.decoding()) < config.rows:
            self._engine.step()

    def __call__(self) -> float:
        made, began = 0, time.perf_counter()
        while made < self._tokens:
            made += sum(x.kind == TOKEN for x in self._engine.step())
        return (time.perf_counter() - began) * len(self._engine.scheduler.slots) / made


WARM, LEAST, READ, PREFILL = "warm request", "read + prefill", "read", "prefill of the suffix"


def first_token_times(config: SafetyConfig, model: Decoder, params: Params) -> tuple[Samples, dict]:
    """Seconds to the first token of a warm request on pages, and of what it cannot do without.

    Read: the groups of its prefix out of host memory, by copy and with checksums, and one copy of
    as many bytes to the device: the tier's bandwidth for just these bytes. Prefill: of the suffix,
    on a cache that stands at the prefix, until its logits are on the host. Also returns facts.
    """
    spec = model.cache_spec
    identity = Identity.of(spec, params, model.config, batch=1)
    rng = np.random.default_rng(config.seed)
    length = config.prefix // spec.granularity * spec.granularity
    size = length + config.suffix
    prompt = rng.integers(0, model.config.vocab_size, size).astype(np.int32)
    store = PrefixStore(spec, identity, host_bytes=1 << 28)
    engine = Engine(
        model,
        params,
        store=store,
        slots=config.rows,
        capacity=config.capacity,
        options=Options(paging=Paging.of(spec, config.rows, config.capacity)),
    )
    list(engine.generate([Request(prompt, 1)]))
    _, stand = model.prefill(
        params, prompt[None, :length], model.init_cache(1, config.capacity), logits="none"
    )
    facts = {"resumed": 0, "computed": 0, "restored_bytes": 0}

    def warm() -> float:
        new = rng.integers(0, model.config.vocab_size, config.suffix)
        asked = np.concatenate([prompt[:length], new]).astype(np.int32)
        (result,) = engine.generate([Request(asked, 1)])
        if result.reused_length != length:
            raise RuntimeError(f"only {result.reused_length} of {length} tokens were resumed")
        facts["resumed"], facts["computed"] = result.reused_length, result.computed_length
        return result.first_token_s

    def read() -> float:
        with store.lookup(prompt) as lease:
            began = time.perf_counter()
            history, checkpoint = store._fetcher.fetch(lease, config.capacity)
            buffers = [x.payload.buffer for x in (*history, checkpoint)]
            jax.block_until_ready(jax.device_put(buffers))
            taken = time.perf_counter() - began
        facts["restored_bytes"] = sum(x.nbytes for x in buffers)
        return taken

    def prefill() -> float:
        cache = jax.block_until_ready(jax.tree.map(jnp.copy, stand))
        began = time.perf_counter()
        logits, _ = model.prefill(params, prompt[None, length:], cache, logits="last")
        np.asarray(logits)
        return time.perf_counter() - began

    blocks = {WARM: warm, READ: read, PREFILL: prefill}
    samples = timing.in_turns(
        blocks, repeats=config.repeats, least_repeats=3, seconds=config.seconds
    )
    store.close()
    facts["tier_mb_per_s"] = facts["restored_bytes"] / statistics.median(samples[READ]) / 1e6
    samples[LEAST] = [a + b for a, b in zip(samples[READ], samples[PREFILL], strict=True)]
    return samples, facts
