"""Training: it learns, it resumes bit for bit, and its files say what happened."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import models
from experiments import (
    checkpoint,
    config_tools,
    optimizer,
    tasks,
    train_checkpoints,
    train_record,
    training,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECALL = str(ROOT / "configs" / "train_recall.py")


def tiny(workdir, **changes):
    """The recall configuration at the smallest size that still has every part."""
    task = tasks.Recall(batch_size=4, length=32, pairs=2, gap=4, vocab=16, eval_batches=1)
    config = config_tools.load(RECALL)
    config.task = task
    small = {
        "model.vocab_size": 16,
        "model.d_model": 16,
        "model.d_ff": 16,
        "model.head_dim": 16,
        "model.rope_dim": 4,
        "model.window": 4,
        "model.index_heads": 2,
        "model.index_dim": 8,
        "model.index_topk": 4,
        "optimizer.warmup_steps": 5,
        # The schedule is compiled in, so other numbers of steps are other programs: keep to this.
        "steps": 40,
        "log_every": 1,
        "eval_every": 8,
        "checkpoint_every": 9,
        "workdir": str(workdir),
    }
    return config_tools.override(config, {**small, **changes})


def equal(left, right) -> bool:
    """Whether two parameter trees are bitwise the same."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


class TemporaryTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.dir = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def metrics(self, name):
        return [(self.dir / name / f"metrics.{kind}").read_bytes() for kind in ("jsonl", "csv")]


class LearningTest(TemporaryTest):
    @parameterized.parameters(("adamw", ("swa", "csa")), ("muon", ("swa", "swa")))
    def test_the_loss_falls_on_the_smoke_setting(self, name, layers):
        changes = {"optimizer.name": name, "model.layer_types": layers}
        result = training.run(tiny(self.dir, **changes))
        losses = [row["loss"] for row in result.rows]
        self.assertLen(losses, 40)
        self.assertLess(np.mean(losses[-8:]), np.mean(losses[:8]) - 0.1)

    def test_the_record_of_a_run(self):
        result = training.run(tiny(self.dir / "run"))
        record = json.loads((self.dir / "run" / "run.json").read_text())
        self.assertEqual(record["seed"], 0)
        self.assertEqual(record["versions"]["jax"], jax.__version__)
        self.assertLen(record["config_digest"], 64)
        written = json.loads((self.dir / "run" / "results.json").read_text())
        self.assertEqual(written, result.results)
        self.assertEqual(written["steps"], 40)
        self.assertEqual(written["stopped"], "steps")
        self.assertEqual(written["chance"], 1 / 8)
        self.assertIn("eval_accuracy", result.rows[-1])

    def test_it_stops_at_the_target_and_stays_stopped(self):
        config = tiny(self.dir, target_accuracy=1e-6)
        first = training.run(config)
        self.assertEqual(first.results["stopped"], "target")
        self.assertEqual(first.results["steps"] % config.eval_every, 0)
        again = training.run(config)
        self.assertEqual(again.results, first.results)
        self.assertTrue(equal(again.params, first.params))

    def test_a_loss_that_is_no_number_stops_the_run(self):
        config = tiny(self.dir, **{"optimizer.learning_rate": 1e30})
        with self.assertRaisesRegex(FloatingPointError, "learning_rate below 1e\\+30"):
            training.run(config)
        self.assertFalse((self.dir / "results.json").exists())

    def test_weights_that_are_no_numbers_are_not_saved(self):
        changes = {"optimizer.learning_rate": 1e30, "optimizer.warmup_steps": 3}
        config = tiny(self.dir, log_every=40, eval_every=40, checkpoint_every=1, **changes)
        with self.assertRaisesRegex(FloatingPointError, "weights that are no numbers"):
            training.run(config)
        with train_checkpoints.TrainCheckpoints(self.dir / "checkpoints", keep=2) as saved:
            state = training.init_state(config, models.build(config.model))
            state, _ = saved.restore(saved.latest_step, state)
        self.assertTrue(all(np.isfinite(x).all() for x in jax.tree.leaves(state.params)))


class ResumeTest(TemporaryTest):
    @pytest.mark.full
    def test_a_run_that_was_interrupted_three_times_is_bitwise_the_same(self):
        whole = training.run(tiny(self.dir / "whole"))
        for at in (5, 23, 36):  # before the first checkpoint, between two, right after one
            with self.assertRaises(_Interrupted):
                training.run(self.interrupted(at))
        resumed = training.run(tiny(self.dir / "resumed"))
        self.assertTrue(equal(resumed.params, whole.params))
        self.assertEqual(self.metrics("resumed"), self.metrics("whole"))

    def test_a_killed_process_is_bitwise_the_same(self):
        whole = training.run(tiny(self.dir / "whole"))
        process = self.start("killed")
        checkpoints = self.dir / "killed" / "checkpoints"
        # No handler runs at SIGKILL: whatever the loop was doing is cut off.
        while process.poll() is None and not (checkpoints / "9").exists():
            time.sleep(0.02)
        self.assertIsNone(process.poll(), "it ended before it could be killed")
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        resumed = training.run(tiny(self.dir / "killed"))
        self.assertTrue(equal(resumed.params, whole.params))
        self.assertEqual(self.metrics("killed"), self.metrics("whole"))

    def test_only_the_last_checkpoints_are_kept(self):
        training.run(tiny(self.dir, keep=2))
        kept = sorted(int(path.name) for path in (self.dir / "checkpoints").iterdir())
        self.assertEqual(kept, [36, 40])

    def test_a_directory_of_another_run_is_refused(self):
        training.run(tiny(self.dir))
        with self.assertRaisesRegex(ValueError, "other values of model.window, seed"):
            training.run(tiny(self.dir, seed=1, **{"model.window": 5}))
        training.run(tiny(self.dir, keep=5))

    def test_a_run_that_produced_nothing_lets_a_corrected_one_through(self):
        for wrong in (
            {"model.window": -1},  # the model is refused
            {"init_from": str(self.dir / "none")},
            {"task.length": 31},  # and the first batch cannot be traced
        ):
            config = tiny(self.dir / "run", **wrong)
            with (
                absltest.mock.patch.object(tasks.Recall, "batch", lambda *a: {}),
                self.assertRaises((ValueError, KeyError)),
            ):
                training.run(config)
            self.assertTrue((self.dir / "run" / "config.json").exists())
        train_record.begin(tiny(self.dir / "run"))
        (self.dir / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        train_record.begin(tiny(self.dir / "run"))
        with self.assertRaisesRegex(ValueError, "other values of seed"):
            train_record.begin(tiny(self.dir / "run", seed=1))

    def test_what_a_directory_holds(self):
        self.assertFalse(train_record.holds_work(self.dir))
        (self.dir / "checkpoints" / "9.orbax-checkpoint-tmp-1").mkdir(parents=True)
        (self.dir / "metrics.jsonl").write_text("")
        self.assertFalse(train_record.holds_work(self.dir))
        (self.dir / "checkpoints" / "9").mkdir()
        self.assertTrue(train_record.holds_work(self.dir))

    def interrupted(self, at):
        config = tiny(self.dir / "resumed")
        config.task = _Interrupting(**vars(config.task), at=at)
        self.enter_context(_registered())
        return config

    def start(self, name):
        # A pause at every step leaves time to kill it in the middle.
        code = (
            "import time; from tests.experiments import train_test as t; "
            "from experiments import tasks, training; real = tasks.Recall.batch; "
            "tasks.Recall.batch = lambda *a: (time.sleep(0.05), real(*a))[1]; "
            f"training.run(t.tiny({str(self.dir / name)!r}))"
        )
        return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)


class IndexerTest(TemporaryTest):
    def test_the_phases_follow_the_schedule(self):
        config = tiny(self.dir, **{"indexer.dense_steps": 2, "indexer.frozen_steps": 1}).indexer
        phases = [training.phase_of(config, step).value for step in range(5)]
        self.assertEqual(phases, ["dense", "dense", "frozen", "sparse", "sparse"])

    @parameterized.parameters(
        (training.Phase.DENSE, 1.0, True, True),
        (training.Phase.DENSE, 0.0, True, False),
        (training.Phase.SPARSE, 1.0, True, True),
        (training.Phase.FROZEN, 1.0, False, True),
    )
    def test_what_moves_in_a_step(self, phase, kl_weight, base, indexer):
        changes = {
            "indexer.kl_weight": kl_weight,
            "optimizer.weight_decay": 0.0,
            "optimizer.warmup_steps": 0,
        }
        config, model = tiny(self.dir, **changes), _StandIn()
        before = training.init_state(config, model).params
        state = training.init_state(config, model)
        state, _ = training.make_step(config, model)(state, config.task.batch(0), phase)
        moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, state.params)
        expected = {"embed": base, "indexer": {"w": indexer}, "table": False}
        self.assertEqual(moved, expected)

    def test_the_divergence_teaches_the_indexer_and_nothing_else(self):
        config = tiny(self.dir)
        model = models.build(config.model)
        params, batch = model.init(jax.random.key(0)), config.task.batch(0)

        @jax.jit
        def grads(weight):
            def loss(params):
                return training.objective(model, params, batch, select="topk", kl_weight=weight)[0]

            return jax.grad(loss)(params)

        without, with_it = jax.tree.leaves(grads(0.0)), jax.tree.leaves(grads(1.0))
        taught = 0
        for a, b, group in zip(
            without, with_it, jax.tree.leaves(optimizer.labels(params)), strict=True
        ):
            if group == optimizer.INDEXER:
                np.testing.assert_array_equal(a, 0)
                taught += int(np.any(np.asarray(b) != 0))
            else:
                np.testing.assert_array_equal(a, b)
        self.assertGreater(taught, 0)

    def test_a_run_through_all_phases(self):
        changes = {"indexer.dense_steps": 4, "indexer.frozen_steps": 4}
        result = training.run(tiny(self.dir, **changes), _StandIn())
        self.assertTrue(all(np.isfinite(row["indexer_kl"]) for row in result.rows))


class ExportTest(TemporaryTest):
    @parameterized.parameters("float32", "bfloat16", "float16")
    def test_what_is_exported_is_loaded(self, dtype):
        config = tiny(self.dir)
        params = models.build(config.model).init(jax.random.key(0))
        size = checkpoint.export(params, config, self.dir / "model", dtype)
        self.assertEqual(size, sum(path.stat().st_size for path in self.dir.glob("model.*")))
        loaded_config, loaded = checkpoint.load(self.dir / "model")
        self.assertEqual(loaded_config.model, config.model)
        self.assertEqual(loaded_config.task, config.task)
        self.assertNotIn(str(self.dir), (self.dir / "model.json").read_text())
        rounded = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), params)
        self.assertTrue(equal(loaded, rounded))

    def test_a_run_exports_what_it_trained(self):
        result = training.run(tiny(self.dir / "run", export=str(self.dir / "model")))
        self.assertTrue(equal(checkpoint.load(self.dir / "model")[1], result.params))

    def test_a_run_can_start_from_an_export(self):
        config = tiny(self.dir / "run", init_from=str(self.dir / "model"))
        params = models.build(config.model).init(jax.random.key(7))
        checkpoint.export(params, config, self.dir / "model")
        state = training.init_state(config, models.build(config.model))
        self.assertTrue(equal(state.params, params))

    def test_an_export_of_another_model_is_refused(self):
        params = models.build(tiny(self.dir).model).init(jax.random.key(7))
        checkpoint.export(params, tiny(self.dir), self.dir / "model")
        wider = {"model.d_ff": 24, "init_from": str(self.dir / "model")}
        config = tiny(self.dir / "run", **wider)
        message = r"another model: .*mlp/down is \(1, 16, 16\) there and \(1, 24, 16\) here"
        with self.assertRaisesRegex(ValueError, message):
            training.init_state(config, models.build(config.model))

    def test_tensors_that_do_not_fit_are_named(self):
        config = tiny(self.dir)
        params = models.build(config.model).init(jax.random.key(0))
        for change, message in [
            ({"norm": None}, r"missing tensors \['norm'\]"),
            ({"extra": jnp.zeros(1)}, r"unknown tensors \['extra'\]"),
            ({"norm": jnp.zeros(3)}, "norm has"),
        ]:
            wrong = {k: v for k, v in {**params, **change}.items() if v is not None}
            checkpoint.export(wrong, config, self.dir / "model")
            with self.assertRaisesRegex(ValueError, message):
                checkpoint.load(self.dir / "model")


class _StandIn:
    """The smallest model with an indexer, and a table of integers that must not be trained."""

    def init(self, key):
        return {
            "embed": jax.random.normal(key, (16, 8)),
            "indexer": {"w": jax.random.normal(key, (8,))},
            "table": jnp.arange(3),
        }

    def forward(self, params, tokens, *, aux, select):
        x = params["embed"][tokens]
        score = jnp.einsum("btd,d->bt", jax.lax.stop_gradient(x), params["indexer"]["w"])
        return x @ params["embed"].T, {"indexer_kl": jnp.mean(score**2)}


class _Interrupted(Exception):
    """Stands for a crash in the middle of the loop."""


class _Interrupting(tasks.Recall):
    """Recall whose data gives out at one step."""

    def __init__(self, *, at, **fields):
        super().__init__(**fields)
        self.at = at

    def batch(self, step, seed=0):
        if step == self.at:
            raise _Interrupted
        return super().batch(step, seed)


def _registered():
    """While it lasts, the interrupting task passes for recall."""
    return absltest.mock.patch.object(tasks, "name_of", lambda task: "recall")


if __name__ == "__main__":
    absltest.main()
