"""The benchmark end to end on the smallest models: its figures mean nothing, its files do."""

import dataclasses
import importlib.util
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

import models
from experiments import config_tools
from experiments.bench import (
    bench_config,
    compile_time,
    growth,
    report,
    runner,
    side_by_side,
    timing,
    weights,
)
from hetero_kv import contract

ROOT = pathlib.Path(__file__).resolve().parents[2]
HAS_HF = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def tiny(**changes) -> bench_config.BenchConfig:
    """The quick form of the shipped configuration, with fewer layers."""
    config = config_tools.load(str(ROOT / "configs" / "bench_model.py"))
    config.small.model = config.small.model.replace(
        layer_types=("swa", "csa"), mlp_types=("hash_moe", "moe"), chunk=16
    )
    config.small.layouts = ("unstacked",)
    config.compile.model = config.small.model.replace(
        layer_types=("swa",), mlp_types=("dense",), hc_streams=0
    )
    config.growth.model = config.small.model
    config_tools.override(config, {"quick": True, "hf": False, **changes})
    return config


class ConfigTest(parameterized.TestCase):
    def test_the_shipped_sizes_are_what_they_are_called(self):
        config = bench_config.BenchConfig()
        config.check()
        counts = {n: weights.parameter_count(config.size(n).model) for n in config.sizes}
        self.assertBetween(counts["small"], 0.06e6, 0.08e6)
        self.assertBetween(counts["medium"], 5e6, 7e6)
        self.assertBetween(counts["large"], 48e6, 53e6)
        flash = config.compile.model
        self.assertLen(flash.layer_types, report.GOAL_LAYERS)
        kinds = [flash.layer_types.count(kind) for kind in ("swa", "csa", "hca")]
        self.assertEqual(kinds, [2, 21, 20])

    @parameterized.parameters(
        ({"sizes": ("tiny",)}, "sizes"),
        ({"parts": ()}, "parts"),
        ({"growth.kinds": ("mamba",)}, "growth.kinds"),
        ({"small.layouts": ("scanned",)}, "small.layouts"),
        ({"steps": 0}, "steps"),
        ({"steps": 1.5}, r"steps=1\.5: a whole number"),
        ({"seed": -1}, "seed"),
        ({"seconds": -1}, "seconds"),
        ({"warm_steps": -1}, "warm_steps"),
        ({"pause_seconds": -1.0}, "pause_seconds"),
        ({"hf_calls": (-5,)}, "hf_calls"),
        ({"hf_experts": ("foo",)}, "hf_experts"),
        ({"hf_gigabytes": 0}, "hf_gigabytes"),
        ({"compile.batch": 0}, "compile.batch"),
        ({"compile.capacity": 0}, "compile.capacity"),
        ({"compile.model.window": -3}, "compile.model: window"),
        ({"growth.model.window": -3}, "growth.model as swa: window"),
        ({"small.model.window": -3}, "small.model: window"),
        ({"small.model.layer_types": ("foo",) * 4}, "small.model: .*foo"),
        ({"batches": ()}, "batches"),
        ({"workdir": ""}, "workdir"),
    )
    def test_what_makes_no_sense_is_refused(self, changes, message):
        config = config_tools.override(bench_config.BenchConfig(), changes)
        with self.assertRaisesRegex(ValueError, message):
            config.check()


class TimingTest(absltest.TestCase):
    def test_blocks_take_turns_and_the_first_round_does_not_count(self):
        calls, clock = [], iter(range(100))

        def block(name):
            def run():
                calls.append(name)
                return next(clock)

            return run

        rounds = []
        samples = timing.in_turns(
            {"a": block("a"), "b": block("b")},
            repeats=3,
            least_repeats=2,
            seconds=60,
            on_round=lambda samples: rounds.append(len(samples["a"])),
        )
        self.assertEqual("".join(calls), "abababab")
        self.assertEqual(samples, {"a": [2, 4, 6], "b": [3, 5, 7]})
        self.assertEqual(rounds, [1, 2, 3])

    def test_the_least_rounds_are_made_whatever_they_take(self):
        samples = timing.in_turns({"a": lambda: 1.0}, repeats=9, least_repeats=2, seconds=0)
        self.assertEqual(samples, {"a": [1.0, 1.0]})

    def test_usage_is_of_this_process_and_of_others(self):
        with timing.usage() as usage:
            sum(range(10_000))
        self.assertGreaterEqual(usage["seconds"], 0)
        self.assertTrue(usage["other_cores"] is None or usage["other_cores"] >= 0)


class FilledCacheTest(absltest.TestCase):
    def test_evidence_agrees_with_length(self):
        model = models.build(tiny().small.model)
        cache = weights.filled_cache(model, 2, 27, 64, seed=0)
        self.assertEqual(cache.length.tolist(), [27, 27])
        kinds = set()
        for slot in model.cache_spec.slots():
            value, declared = np.asarray(cache.leaf(slot)), slot.leaf.contract
            if isinstance(declared, contract.Evidence):
                kinds.add(declared.kind)
                self.assertTrue((value[:, 0] == value[:, 1]).all())
                if declared.kind == "count":
                    self.assertTrue((value == 27 // 4).all(), slot.path)
                else:
                    self.assertEqual(value.max(), 26, slot.path)
            else:
                self.assertGreater(value.std(), 0.5, slot.path)
        self.assertEqual(kinds, {"count", "positions"})


class RunTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    @pytest.mark.full
    def test_measures_writes_and_goes_on_where_it_stopped(self):
        config = tiny(workdir=str(self.directory))
        results = runner.run(config)
        self.assertEqual(
            list(results["cells"]),
            [
                "model/small/batch 1/context 64",
                "growth/csa",
                "compile/decode_step/stacked",
            ],
        )
        model, grown, compiled = results["cells"].values()
        times = model["arms"]["unstacked"]
        self.assertContainsSubset({"decode_ms", "scanned_ms", "prefill_ms"}, times)
        self.assertTrue(model["scan_agrees"])
        places = [(point["context"], point["capacity"]) for point in grown["points"]]
        self.assertEqual(places, [(256, 260), (1_024, 1_028), (256, 1_028)])
        self.assertEqual(grown["points"][0]["growth"], 1)
        parts = sum(compiled[f"{name}_s"] for name in ("trace", "lower", "compile"))
        self.assertAlmostEqual(compiled["total_s"], parts)

        written = json.loads((self.directory / "quick" / "results.json").read_text())
        self.assertEqual(written, json.loads(json.dumps(results)))
        text = (self.directory / "quick" / "report.md").read_text()
        for table in report.tables(results):
            self.assertIn(f"## {table.title}", text)
            self.assertTrue(all(len(row) == len(table.columns) for row in table.rows))
            table.rich()

        with (
            mock.patch.object(side_by_side, "cell", side_effect=AssertionError),
            mock.patch.object(compile_time, "cell", side_effect=AssertionError),
            mock.patch.object(growth, "cell", return_value=grown) as again,
        ):
            config.growth.batch = 2
            results = runner.run(config)
        again.assert_called_once()
        self.assertLen(results["cells"], 3)

    @pytest.mark.full
    @absltest.skipUnless(HAS_HF, "needs the parity extra")
    def test_beside_hf(self):
        config = tiny(workdir=str(self.directory), parts=("model",), hf=True)
        config.contexts, config.batches = (64,), (2,)
        (cell,) = runner.run(config)["cells"].values()
        self.assertContainsSubset({"decode_ms", "prefill_ms"}, cell["arms"]["hf"])
        self.assertContainsSubset({"decode", "scanned", "prefill"}, cell["over_hf"]["unstacked"])
        self.assertLess(cell["difference"]["unstacked"]["prefill"], 1e-4)
        self.assertLess(cell["difference"]["unstacked"]["decode"], 1e-4)
        self.assertEqual(cell["difference"]["unstacked"]["same_tokens"], 1)
        self.assertIn(cell["hf"]["decode"]["experts"], config.hf_experts)


class ReportTest(absltest.TestCase):
    def test_goals_are_compared_at_their_context(self):
        cell = {
            "part": "model",
            "size": "small",
            "parameters": 71_655,
            "batch": 1,
            "context": report.GOAL_CONTEXT,
            "arms": {"stacked": {"decode_ms": 1.0, "scanned_ms": 0.5, "prefill_ms": 9.0}},
            "over_hf": {"stacked": {"decode": 16.0, "scanned": 39.0, "prefill": 3.0}},
            "difference": {"stacked": {"prefill": 1e-6, "decode": 2e-6, "same_tokens": 1.0}},
            "hf": {
                "prefill": {"call_tokens": 0, "experts": "eager"},
                "decode": {"experts": "eager"},
                "self_difference": 1e-7,
            },
            "scan_agrees": True,
            "logit_size": 3.2,
            "samples": {"stacked decode": [1e-3]},
            "other_cores": 0.5,
            "seconds": 1.0,
            "versions": {"jax": "0"},
            "commit": "",
        }
        cell["arms"]["hf"] = {"decode_ms": 16.0, "prefill_ms": 27.0}
        results = {"cells": {"a": cell}, "versions": {"jax": "1"}, "platform": {}}
        found = {table.title.split(",")[0]: table for table in report.tables(results)}
        met = {row[0]: row[-1] for row in found["Goals"].rows}
        self.assertEqual(
            met,
            {
                "small, batch 1: decode, HF/ours": "yes",
                "small, batch 1: scanned, HF/ours": "no",
                "small, batch 1: prefill, HF/ours": "yes",
            },
        )
        self.assertIn("0.50 BUSY", found["Conditions"].rows[0])
        self.assertEqual(found["Conditions"].rows[0][-1], "jax 0")
        cell["context"] *= 2
        self.assertNotIn("Goals", [t.title.split(",")[0] for t in report.tables(results)])

    def test_numbers_have_three_digits(self):
        numbers = [0.0, 0.01234, 0.1234, 1.234, 12.34, 123.4, 12_340.0, None]
        expected = ["0.00", "0.0123", "0.123", "1.23", "12.3", "123", "12,340", "–"]
        self.assertEqual([report.number(value) for value in numbers], expected)


class QuickTest(absltest.TestCase):
    def test_quick_is_smaller_and_elsewhere(self):
        config = bench_config.BenchConfig(quick=True)
        quick = config.effective()
        self.assertEqual((quick.sizes, quick.batches), (("small",), (1,)))
        self.assertEqual(quick.workdir, "runs/bench_model/quick")
        self.assertEqual(config, bench_config.BenchConfig(quick=True))
        plain = dataclasses.replace(config, quick=False)
        self.assertIs(plain.effective(), plain)


if __name__ == "__main__":
    absltest.main()
