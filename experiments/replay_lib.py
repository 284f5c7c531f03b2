"""Trace replay: the store's own catalog and policies, with sizes only, over a request trace."""

import dataclasses
import time
from collections.abc import Callable

from experiments.traces import Trace
from hetero_kv.contract import CacheSpec, History, LayerSpec, Leaf, Segment, Window
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.plan import Geometry
from hetero_kv.prefix.policy import Flops, Policy, eviction
from hetero_kv.prefix.sized import SizedStore

ENTRY = 584  # bytes: 448 FP8 values, 64 BF16 rope values, 8 of scales
INDEX_KEY = 68  # bytes: 128 FP4 values, 4 of scales
UNLIMITED = 1 << 62  # bytes

# Of V4-Flash, by the published formulas: 13e9 active parameters, and per earlier token what the
# indexers of 21 layers and the attention of 20 HCA layers take.
FLASH_FLOPS = Flops(
    per_token=2 * 13e9,
    per_pair=21 * 64 * 128 * 2 / 4 + 20 * 64 * 1024 * 2 / 128,
)
COSTS: dict[str, Flops | None] = {
    "": None,
    "flops": FLASH_FLOPS,
    "depth": Flops(1.0, 1.0 / (64 * 512)),  # 1 + depth / 64, in blocks of 512
}


def flash_spec(block: int, chunk: int = 128, window: int = 128) -> CacheSpec:
    """The cache of V4-Flash as deployed: 2 sliding, 21 CSA and 20 HCA layers, in bytes.

    Built by hand, since entries are stored in 584 bytes there and not in a dtype of ours. Tails (a
    few rows a layer, empty at block ends but for the overlap) are left out, as in the published
    sizes. Exact replay takes 43 * 127 tokens, on a chunk grid of 128 that is 5,504.
    """
    row = Leaf(
        contract=Window(window), component="windows", rows=window, width=(ENTRY,), dtype="u1"
    )

    def history(ratio: int, width: int, component: str) -> Leaf:
        return Leaf(contract=History(ratio), component=component, width=(width,), dtype="u1")

    sliding = LayerSpec("swa", (("window", row),))
    sparse = LayerSpec(
        "csa",
        (
            ("window", row),
            ("entries", history(4, ENTRY, "csa entries")),
            ("index_keys", history(4, INDEX_KEY, "csa index keys")),
        ),
    )
    heavy = LayerSpec("hca", (("window", row), ("entries", history(128, ENTRY, "hca entries"))))
    segments = (Segment(2, (sliding,)), Segment(20, (sparse, heavy)), Segment(1, (sparse,)))
    return CacheSpec(segments, chunk=chunk, block=block)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One replay.

    checkpoints: as in `placement.placement`, or "stateless": a model without windows and tails,
    whose hash hits all count. order: an order of eviction, with "+flops" or "+depth" told costs.
    capacity: bytes, 0: unlimited. partial: see `Request.keys`.
    """

    checkpoints: str
    order: str = "lru"
    capacity: int = 0
    partial: bool = True
    checkpoint_share: float = 0.5


@dataclasses.dataclass
class Outcome:
    """What one replay counted. Ratios are left to whoever reads it."""

    requests: int = 0
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    candidate_tokens: int = 0  # hash hits
    candidate_blocks: int = 0
    resumable_tokens: int = 0
    replayed_tokens: int = 0  # of the resumable ones
    prompt_flops: float = 0.0
    saved_flops: float = 0.0
    written_bytes: int = 0
    restored_bytes: int = 0
    evicted_bytes: int = 0
    used_history_bytes: int = 0  # at the end
    used_checkpoint_bytes: int = 0
    checkpoints: int = 0  # ever stored
    collisions: int = 0
    seconds: float = 0.0  # of the process's CPU time

    def values(self) -> dict:
        """As JSON."""
        return dataclasses.asdict(self)


def policy_of(cell: Cell, flops: Flops = FLASH_FLOPS) -> Policy:
    """The policy that the cell names; flops: what "+flops" tells it."""
    order, _, cost = cell.order.partition("+")
    if cost not in COSTS:
        raise ValueError(f"{cell.order!r}: costs are {', '.join(filter(None, COSTS))}")
    stateless = cell.checkpoints == "stateless"
    return Policy.named(
        "never" if stateless else cell.checkpoints,
        eviction=eviction(order),
        cost=flops if cost == "flops" else COSTS[cost],
        checkpoint_share=0.0 if stateless else cell.checkpoint_share,
    )


def keys_of(trace: Trace, partial: bool) -> list[Keys]:
    """Of all requests, for use by several cells."""
    return [x.keys(partial) for x in trace.requests]


def replay(
    trace: Trace,
    keys: list[Keys],
    spec: CacheSpec,
    cell: Cell,
    shown: Callable[[int], None] = lambda done: None,
    *,
    flops: Flops = FLASH_FLOPS,
) -> Outcome:
    """Runs one cell: every request looks up, prefills the rest and publishes.

    flops: what tokens cost, of prompt_flops and saved_flops.
    """
    geometry = Geometry.of(spec)
    if cell.checkpoints == "stateless":
        geometry = dataclasses.replace(geometry, checkpoint=(), granularity=geometry.block)
    size = geometry.block
    block_bytes, state_bytes = spec.block_bytes(), spec.checkpoint_bytes()
    store = SizedStore(
        geometry,
        block_bytes,
        state_bytes,
        capacity=cell.capacity or UNLIMITED,
        policy=policy_of(cell, flops),
    )
    total = Outcome()
    began = time.process_time()
    for number, (request, names) in enumerate(zip(trace.requests, keys, strict=True), 1):
        blocks = len(names.keys)
        with store.lookup(names) as lease:
            found = lease.plan
            store.publish(names, blocks, lease.checkpoint_points)
        candidate = min(found.candidate_length, request.n_in)
        resumed = min(found.resumable_length, request.n_in)
        start, stop = found.replay or (0, 0)
        replayed = min(stop - start, resumed)
        total.requests += 1
        total.prompt_tokens += request.n_in
        total.prompt_blocks += len(request.block_ids)
        total.candidate_tokens += candidate
        total.candidate_blocks += found.candidate_length // size
        total.resumable_tokens += resumed
        total.replayed_tokens += replayed
        total.prompt_flops += flops(0, request.n_in)
        total.saved_flops += flops(0, resumed - replayed)
        total.restored_bytes += found.resumable_length // size * block_bytes
        total.restored_bytes += state_bytes * (lease.checkpoint is not None)
        if not number % 500:
            shown(number)
    total.seconds = time.process_time() - began
    _count(total, store)
    return total


def _count(total: Outcome, store: SizedStore) -> None:
    counters = store.counters
    for kind in ("history", "checkpoint"):
        total.written_bytes += counters.get("stored_bytes_total", kind=kind)
        total.evicted_bytes += counters.get("evicted_bytes_total", kind=kind)
        setattr(total, f"used_{kind}_bytes", store.catalog.used[kind])
    total.checkpoints = counters.get("stored_groups_total", kind="checkpoint")
    total.collisions = counters.get("publish_cut_total", reason="collision")
