"""Routing: one instance is plain replay, affinity keeps hits, load keeps balance."""

import json
import pathlib

import pytest

from configs import routing as config_file
from experiments import replay_lib, routing, routing_lib, traces
from experiments.replay_lib import Cell

TRACE = traces.generate(traces.GeneratorConfig(requests=250, follow=0.9, turns=0.8))
SPEC = replay_lib.flash_spec(TRACE.block_size)
CELL = Cell("fork", "lru", 1_000 * SPEC.block_bytes(), partial=False)
KEYS = replay_lib.keys_of(TRACE, partial=False)


def route(count: int, way: str, utilisation: float = 0.8) -> routing_lib.Routed:
    return routing_lib.route(TRACE, KEYS, SPEC, CELL, count, way, utilisation)


@pytest.mark.parametrize("way", ["round_robin", "load_aware"])
def test_one_instance_is_a_replay(way: str) -> None:
    routed, found = route(1, way), replay_lib.replay(TRACE, KEYS, SPEC, CELL)
    assert routed.hash_hit == pytest.approx(found.candidate_tokens / found.prompt_tokens)
    own = (found.resumable_tokens - found.replayed_tokens) / found.prompt_tokens
    assert routed.effective == pytest.approx(own) and routed.balance == 1


def test_prefix_and_load() -> None:
    blind, greedy, both = (route(4, x) for x in ("round_robin", "prefix", "load_aware"))
    assert both.effective > blind.effective + 0.1
    # Everyone shares the first block, so affinity alone sends all to one place.
    assert greedy.balance == 4 > both.balance
    assert both.first_token_p95 < greedy.first_token_p95
    quiet = route(4, "round_robin", utilisation=0.01)
    assert quiet.first_token_p95 < blind.first_token_p95


def test_an_unknown_way() -> None:
    with pytest.raises(ValueError, match="unknown"):
        route(2, "random")


def test_a_run_end_to_end(tmp_path: pathlib.Path) -> None:
    config = config_file.get_config()
    config.trace.limit, config.instances, config.workdir = 60, (1, 2), str(tmp_path)
    results = routing.run(config)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert set(results["routes"]) == {"1", "2"} and set(results["routes"]["2"]) == {
        "round_robin", "least_loaded", "prefix", "load_aware"
    }  # fmt: skip
    assert "## Which instance" in (tmp_path / "report.md").read_text()
    for field, value in (("routes", ("x",)), ("instances", (0,)), ("capacity", 0.0),
                         ("checkpoints", "often"), ("workdir", "")):  # fmt: skip
        bad = config_file.get_config()
        setattr(bad, field, value)
        with pytest.raises(ValueError):
            routing.run(bad)
