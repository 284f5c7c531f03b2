"""Trace replay: published figures where the traces are at hand, and the run end to end."""

import json
import pathlib
import tempfile

import pytest
from absl.testing import absltest, parameterized

from experiments import config_tools, replay, replay_config, replay_lib, replay_report, traces
from experiments.replay_lib import Cell
from tests.experiments.traces_test import published

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = replay_lib.flash_spec(traces.MOONCAKE_BLOCK)


def run(trace: traces.Trace, cell: Cell) -> replay_lib.Outcome:
    return replay_lib.replay(trace, replay_lib.keys_of(trace, cell.partial), SPEC, cell)


def effective(found: replay_lib.Outcome) -> float:
    return (found.resumable_tokens - found.replayed_tokens) / found.prompt_tokens


class SizesTest(absltest.TestCase):
    def test_flash_is_as_published(self):
        self.assertLen(list(SPEC.layers()), 43)
        self.assertAlmostEqual(SPEC.history_bytes_per_token(), 3_514.25)
        self.assertEqual(SPEC.checkpoint_bytes(), 128 * 43 * 584)
        self.assertEqual(SPEC.replay_length, 5_504)
        total = SPEC.history_bytes_per_token() * 2**20 + SPEC.checkpoint_bytes()
        self.assertAlmostEqual(total / 1e9, 3.688, delta=0.01)
        # At 2^20 tokens one more costs 0.140 T operations.
        cost = replay_lib.FLASH_FLOPS(2**20, 2**20 + 1)
        self.assertAlmostEqual(cost / 1e12, 0.140, delta=0.003)


class PublishedTest(parameterized.TestCase):
    """Hit ratios that others measured on the same traces."""

    @parameterized.parameters(
        ("conversation", "stateless", True, 0.374, 0.003),
        ("synthetic", "stateless", True, 0.651, 0.003),
        ("synthetic", "every:4", True, 0.629, 0.01),
        ("synthetic", "every:16", True, 0.541, 0.01),
        ("synthetic", "zero", True, 0.505, 0.01),
        ("synthetic", "end", False, 0.509, 0.01),
    )
    def test_tokens(self, name, checkpoints, partial, want, delta):
        found = run(published(name), Cell(checkpoints, partial=partial))
        self.assertAlmostEqual(effective(found), want, delta=delta)
        self.assertEqual(found.collisions, 0)

    @parameterized.parameters(
        ("every:4", True, 0.321),
        ("every:8", True, 0.291),
        ("every:16", True, 0.240),
        ("every:32", True, 0.167),
        ("zero", True, 0.215),
        ("end", False, 0.350),
    )
    @pytest.mark.full
    def test_every_placement_on_the_long_trace(self, checkpoints, partial, want):
        found = run(published("conversation"), Cell(checkpoints, partial=partial))
        self.assertAlmostEqual(effective(found), want, delta=0.01)

    @parameterized.parameters(("conversation", 0.212), ("synthetic", 0.424))
    def test_lru_at_ten_thousand_blocks(self, name, want):
        found = run(published(name), Cell("stateless", "lru", 10_000 * SPEC.block_bytes()))
        self.assertAlmostEqual(found.candidate_blocks / found.prompt_blocks, want, delta=0.005)


class ReplayTest(parameterized.TestCase):
    def config(self, **changes: object):
        config = config_tools.load(str(ROOT / "configs" / "replay.py"))
        config.generator.requests = 300
        config.evictions, config.capacities = ("lru", "gdsf+depth", "flop+flops"), (0.05, 0.2)
        config.placements, config.budget_placements = ("full", "zero", "end"), ("end",)
        config.lru_blocks = (100,)
        config.workdir = self.enterContext(tempfile.TemporaryDirectory())
        return config_tools.override(config, changes)

    def test_a_run_end_to_end_and_again(self):
        config = self.config()
        results = replay.run(config)
        self.assertLen(results["cells"], 2 + 3 * 2 + 3 + 2)
        workdir = pathlib.Path(config.workdir)
        self.assertEqual(json.loads((workdir / "results.json").read_text()), results)
        for name in ("config.json", "run.json", "replay.png"):
            self.assertTrue((workdir / name).stat().st_size, name)
        report = (workdir / "report.md").read_text()
        for table in replay_report.exhibit(results).shown:
            self.assertIn(f"## {table.title}", report)
        cells = results["cells"]
        for cell in cells.values():
            self.assertLessEqual(cell["resumable_tokens"], cell["candidate_tokens"])
            held = cell["used_history_bytes"] + cell["used_checkpoint_bytes"]
            self.assertLessEqual(held, cell["capacity"] or held)
            self.assertEqual(cell["written_bytes"] >= held + cell["evicted_bytes"], True)
        ideal, small = cells["ideal"], cells["lru at 100 blocks"]
        self.assertLess(small["candidate_blocks"], ideal["candidate_blocks"])
        # Finished cells are kept: a changed figure stays, and only what is new is run.
        cells["ideal"]["candidate_blocks"] = -1
        (workdir / "results.json").write_text(json.dumps(results))
        again = replay.run(config)
        self.assertEqual(again["cells"]["ideal"]["candidate_blocks"], -1)
        config.generator.seed = 1
        self.assertGreater(replay.run(config)["cells"]["ideal"]["candidate_blocks"], 0)

    def test_where_another_order_hits_most_is_marked(self):
        def cell(hits: int) -> dict:
            return {"part": "eviction", "candidate_blocks": hits, "prompt_blocks": 100}

        hits = {"a": (10, 20, 30), "b": (6, 24, 28)}
        shares = (0.01, 0.04, 0.16)
        cells = {
            f"eviction/{order}/{share}": cell(x)
            for order, of in hits.items()
            for share, x in zip(shares, of, strict=True)
        }
        first, second = replay_report._crossings({"cells": cells})
        # Four more of a hundred, then four fewer: half-way, on an axis of powers.
        self.assertEqual(first[:2], ("a", "b"))
        self.assertAlmostEqual(first[2], 0.02)
        self.assertAlmostEqual(first[3], 0.15)
        self.assertEqual(second[:2], ("b", "a"))
        figure = replay_report.figure({"cells": cells})
        texts = [x.get_text() for x in figure.axes[0].texts]
        self.assertEqual(texts, ["a | b", "b | a"])

    def test_one_part_of_a_file(self):
        path = f"{self.enterContext(tempfile.TemporaryDirectory())}/trace.jsonl"
        traces.save(traces.generate(traces.GeneratorConfig(requests=40)), path)
        results = replay.run(self.config(trace=path, limit=30, parts=("ideal",)))
        self.assertEqual(results["trace"]["requests"], 30)
        self.assertEqual({x["part"] for x in results["cells"].values()}, {"ideal"})

    @parameterized.parameters(
        {"parts": ("all",)},
        {"evictions": ("mru",)},
        {"evictions": ("gdsf+time",)},
        {"placements": ("often",)},
        {"capacities": (0.0,)},
        {"trace": "none.jsonl"},
        {"lru_blocks": (0,)},
        {"limit": -1},
        {"generator": traces.GeneratorConfig(first_median=0.0)},
        {"generator": traces.GeneratorConfig(hot_prompts=())},
        {"workdir": ""},
        *({x: ()} for part in replay_config.LISTS.values() for x in part),
    )
    def test_what_makes_no_sense_is_refused(self, **changes):
        with self.assertRaises(ValueError):
            replay.run(self.config(**changes))


if __name__ == "__main__":
    absltest.main()
