"""Long checks of training: what each arm of the recall task learns, and kills at any moment."""

import pathlib
import random
import subprocess
import sys
import tempfile
import time

import pytest
from absl.testing import absltest, parameterized

from experiments import config_tools, training
from tests.experiments import train_test

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECALL = str(ROOT / "configs" / "train_recall.py")
KILLS = 20

RUN = (
    "from tests.experiments import train_test; from experiments import training; "
    "training.run(train_test.tiny({!r}, checkpoint_every=3, eval_every=4))"
)


@pytest.mark.full
class RecallArmsTest(parameterized.TestCase):
    """About a minute of one core a seed for the arms that learn, two for the one that cannot."""

    def accuracy(self, layers, seed):
        changes = {
            "model.layer_types": layers,
            "seed": seed,
            "workdir": self.enter_context(tempfile.TemporaryDirectory()),
        }
        config = config_tools.override(config_tools.load(RECALL), changes)
        return training.run(config).results["eval_accuracy"]

    @parameterized.product(layers=[("full", "full"), ("swa", "csa")], seed=[0, 1, 2])
    def test_full_attention_and_compressed_entries_find_the_facts(self, layers, seed):
        self.assertGreaterEqual(self.accuracy(layers, seed), 0.99)

    @parameterized.parameters(0, 1, 2)
    def test_windows_alone_stay_at_chance(self, seed):
        self.assertLessEqual(self.accuracy(("swa", "swa"), seed), 0.06)


@pytest.mark.full
class KillLoopTest(absltest.TestCase):
    def test_a_run_killed_at_random_moments_is_bitwise_the_same(self):
        directory = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        subprocess.run(self.command(directory / "warm"), cwd=ROOT, check=True)  # fills the cache
        began = time.monotonic()
        subprocess.run(self.command(directory / "whole"), cwd=ROOT, check=True)
        seconds = time.monotonic() - began
        rng = random.Random(0)
        for _ in range(KILLS):
            process = subprocess.Popen(self.command(directory / "killed"), cwd=ROOT)
            try:
                process.wait(timeout=seconds * rng.uniform(0.4, 1.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        subprocess.run(self.command(directory / "killed"), cwd=ROOT, check=True)
        for name in ("metrics.jsonl", "metrics.csv"):
            whole, killed = (directory / run / name for run in ("whole", "killed"))
            self.assertEqual(killed.read_bytes(), whole.read_bytes())
        params = [self.params(directory / run) for run in ("whole", "killed")]
        self.assertTrue(train_test.equal(*params))

    def command(self, workdir):
        return [sys.executable, "-c", RUN.format(str(workdir))]

    def params(self, workdir):
        config = train_test.tiny(workdir, checkpoint_every=3, eval_every=4)
        return training.run(config).params  # it is finished: nothing is trained


if __name__ == "__main__":
    absltest.main()
