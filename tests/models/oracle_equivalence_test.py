"""Logits and every cached leaf equal the reference written from the equations, for every switch."""

import numpy as np
import pytest

from hetero_kv.contract import Evidence
from models.decoder import Decoder
from tests import variants
from tests.models import tiny
from tests.oracle.trace import LayerTrace, Trace

TOLERANCE = 1e-4
NEAR_TIE = 1e-5  # a choice with less of a gap may differ between float32 and float64


def clear_stop(trace: Trace) -> int:
    """Positions before the first near tie of any choice: those after it may rightly differ."""
    gaps = [trace.smallest_gap()]
    gaps += [layer.router_gap for layer in trace.layers if layer.router_gap is not None]
    near = np.flatnonzero(np.min(gaps, axis=0) < NEAR_TIE)
    stop = int(near[0]) if near.size else len(gaps[0])
    return int(min(stop, *(layer.unsure for layer in trace.layers)))


def assert_logits(name: str, row: int, got: np.ndarray, start: int) -> None:
    """Compares logits of positions `start ..` with the reference."""
    want, trace = tiny.reference(name, row)
    stop = clear_stop(trace)
    error = np.abs(got[: stop - start] - want[start : start + len(got)][: stop - start])
    print(f"{name} row {row} from {start}: error {error.max(initial=0):.1e}")
    assert error.max(initial=0) <= TOLERANCE, f"{name} row {row}"


@pytest.mark.parametrize("name", tiny.CHANGES)
def test_enough_is_exercised(name: str) -> None:
    config, rows = tiny.config(name), range(tiny.ROWS)
    if config.cache_layouts:  # a value on the border of two codes ends a row early: one suffices
        rows = [max(rows, key=lambda x: clear_stop(tiny.reference(name, x)[1]))]
    for row in rows:
        stop = clear_stop(tiny.reference(name, row)[1])
        print(f"{name} row {row}: {tiny.CAPACITY - stop} positions skipped after a near tie")
        assert stop > config.csa_ratio * (config.index_topk + 1)
        assert stop > 2 * config.hca_ratio + 1
        magnitude = np.abs(tiny.reference(name, row)[0]).max()
        assert 4 < magnitude < 40


@pytest.mark.parametrize("name", tiny.CHANGES)
def test_forward(name: str) -> None:
    for row in range(tiny.ROWS):
        assert_logits(name, row, tiny.forward(name)[row], 0)


def by_position(
    name: str, layer: int, leaf: str, trace: LayerTrace, ratio: int
) -> np.ndarray | None:
    """What the reference has for a leaf: rows by position, or entries by index."""
    prefix = f"model.layers.{layer}.self_attn.compressor."
    if leaf == "kv":
        parts = [x.reshape(len(x), -1) for x in (trace.keys, trace.values)]
        return np.concatenate(parts, axis=-1)
    if leaf.endswith("tail"):
        index = leaf == "index_tail"
        kv = trace.index_raw_kv if index else trace.raw_kv
        gate = trace.index_raw_gate if index else trace.raw_gate
        bias = tiny.weights(name)[prefix + ("indexer." if index else "") + "position_bias"]
        return np.concatenate([kv, gate + bias[np.arange(len(kv)) % ratio]], axis=-1)
    return {"window": trace.rows, "entries": trace.entries, "index_keys": trace.index_keys}[leaf]


def assert_leaves(name: str, made: Decoder, cache) -> None:
    """Every live row of every leaf, and the evidence."""
    worst: dict[str, float] = {}
    for slot in made.cache_spec.slots():
        contract, siblings = slot.leaf.contract, made.cache_spec.segments[slot.segment].layers
        for repeat in range(slot.repeats):
            layer = made.runs[slot.segment].layer(repeat, slot.layer)
            for row, length in enumerate(map(int, cache.length)):
                value = np.asarray(slot.leaf.numbers(cache.leaf(slot)))[repeat, row]
                trace = tiny.reference(name, row)[1]
                if length > clear_stop(trace):
                    continue
                if isinstance(contract, Evidence):
                    of = dict(siblings[slot.layer].leaves)[contract.of]
                    counts = contract.kind == "count"
                    right = of.contract.count(length) if counts else of.ring_positions(length)
                    np.testing.assert_array_equal(value, right)
                    continue
                live = slot.leaf.live_rows(length, cache.capacity)
                ring = slot.leaf.is_ring
                at = slot.leaf.ring_positions(length) if ring else np.arange(live.size)
                ratio = getattr(contract, "group", 0) or 1
                want = by_position(name, layer, slot.name, trace.layers[layer], ratio)[at[live]]
                error = np.abs(value[live] - want).max(initial=0.0)
                worst[slot.name] = max(worst.get(slot.name, 0.0), error)
                assert error <= TOLERANCE, f"{slot.path} row {row} length {length}"
    print(f"{name} at {list(map(int, cache.length))}", {k: f"{v:.1e}" for k, v in worst.items()})


@pytest.mark.parametrize("name", variants.some(tiny.CHANGES, ("v4",)))
def test_cache_after_prefill_and_decode(name: str) -> None:
    made, params = tiny.model(name)
    valid = np.array([29, 22])
    logits, cache = made.prefill(params, tiny.tokens()[:, :29], tiny.empty(made), valid)
    for row in range(tiny.ROWS):
        assert_logits(name, row, np.asarray(logits)[row, : valid[row]], 0)
    assert_leaves(name, made, cache)
    logits, cache = tiny.decode(name, cache, 21)
    for row in range(tiny.ROWS):
        assert_logits(name, row, logits[row], valid[row])
    assert_leaves(name, made, cache)
