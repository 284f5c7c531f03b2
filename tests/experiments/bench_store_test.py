"""The store's benchmark end to end on few prompts: its figures mean nothing, its files do."""

import pathlib
import tempfile

import pytest
from absl.testing import absltest, parameterized

from experiments import bench_store, config_tools

ROOT = pathlib.Path(__file__).resolve().parents[2]


class BenchStoreTest(parameterized.TestCase):
    def config(self, **changes: object):
        config = config_tools.load(str(ROOT / "configs" / "bench_store.py"))
        config.parts = ("control_plane",)
        config.workdir = self.enterContext(tempfile.TemporaryDirectory())
        return config_tools.override(config, {"quick": True, **changes})

    def test_the_control_plane(self):
        config = self.config()
        rows = bench_store.run(config)["parts"]["control_plane"]
        cells = [(x["block"], x["room"]) for x in rows]
        self.assertEqual(cells, [(64, 1.5), (64, 0.25), (128, 1.5), (128, 0.25)])
        for row in rows:
            self.assertGreater(row["requests_per_s"], 0)
            # From the third prompt of a prefix on, it is resumed: 10 of 12 times, half a prompt.
            self.assertBetween(row["resumed"], 0.40, 0.42)
            self.assertEqual(row["evicted_groups"] > 0, row["room"] < 1)
            self.assertEqual(row["goal"] is None, row["room"] < 1)
        report = pathlib.Path(config.workdir) / "quick" / "report.md"
        self.assertIn("## Control plane", report.read_text())

    @pytest.mark.full
    def test_restoring_beside_prefilling(self):
        config = self.config(parts=("restore_bench",))
        (row,) = bench_store.run(config)["parts"]["restore_bench"]
        self.assertEqual(row["tokens"], 256)
        # Four blocks and a checkpoint: all of it was read from disk, or the arm would raise.
        self.assertGreater(row["restored_bytes"], 20_000)
        self.assertGreater(row["prefill_over_restore"], 0)

    def test_the_disk_tier(self):
        config = self.config(parts=("disk_bench",))
        rows = bench_store.run(config)["parts"]["disk_bench"]
        self.assertLen(rows, 2)  # put and get
        report = pathlib.Path(config.workdir) / "quick" / "report.md"
        self.assertIn("## disk bench", report.read_text())

    @parameterized.parameters(
        {"parts": ()},
        {"parts": ("workdir",)},
        {"workdir": ""},
        {"control_plane.shared": 5_000},
        {"control_plane.rooms": ()},
        {"control_plane.blocks": (0,)},
        {"control_plane.blocks": (64, 8_192)},  # of prompts of 4,096 tokens
        {"control_plane.blocks": ()},
        {"control_plane.seed": -1},
        {"control_plane.policy": "bogus"},
        {"control_plane.shared": 0},
        {"parts": ("disk_bench",), "disk_bench.object_bytes": (0,)},
        {"parts": ("disk_bench",), "disk_bench.directory": "/nope"},
        {"parts": ("disk_bench",), "disk_bench.capacity_bytes": 1},
        {"parts": ("restore_bench",), "restore_bench.sizes": ("huge",)},
        {"parts": ("restore_bench",), "restore_bench.length": 300},
        {"restore_bench.seed": 0.5},
    )
    def test_what_makes_no_sense_is_refused(self, **changes):
        with self.assertRaises(ValueError):
            bench_store.run(self.config(**changes))


if __name__ == "__main__":
    absltest.main()
