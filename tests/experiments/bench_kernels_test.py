"""The kernels' benchmark and tuning end to end on a CPU: figures mean nothing, files do."""

import pathlib
import tempfile

import pytest
from absl.testing import absltest

from experiments import bench_kernels, config_tools, tune
from experiments.bench.kernel_cases import Cases
from hetero_kv.kernels import tuning

ROOT = pathlib.Path(__file__).resolve().parents[2]


class BenchKernelsTest(absltest.TestCase):
    def config(self, **changes: object):
        config = config_tools.load(str(ROOT / "configs" / "bench_kernels.py"))
        config.workdir = self.enterContext(tempfile.TemporaryDirectory())
        config.tokens, config.batch = (16_384,), 2
        config.inner = config.repeats = 2
        config.copy_bytes, config.matmul, config.interpret = 1 << 20, 512, False
        return config_tools.override(config, changes)

    def test_references_on_a_cpu(self):
        config = self.config()
        results = bench_kernels.run(config)
        ops = {row["op"] for row in results["rows"]}
        self.assertEqual(ops, set(config.ops))
        for row in results["rows"]:
            self.assertGreater(row["reference_us"], 0)
            self.assertGreater(row["roofline_us"], 0)
            self.assertEqual(row["implementation"], "reference")
            self.assertNotIn("refused", row)
        report = (pathlib.Path(config.workdir) / "report.md").read_text()
        self.assertIn("Kernels on cpu", report)

    @pytest.mark.full
    def test_kernels_are_checked_by_an_interpreter(self):
        config = self.config(ops=("page_copy", "compressor"), interpret=True)
        results = bench_kernels.run(config)
        for row in results["rows"]:
            self.assertEqual(row["checked"], "interpret")
            self.assertGreater(row["agrees"], 0.99)

    @pytest.mark.full
    def test_a_kernel_that_cannot_is_told(self):
        config = self.config(ops=("indexer",), implementation="pallas_gpu")
        plain, quantised = bench_kernels.run(config)["rows"]
        self.assertIn("kernel for 'cuda'", plain["refused"])
        self.assertIn("keys of float32", quantised["refused"])
        self.assertGreater(quantised["reference_us"], 0)

    def test_wrong_configurations(self):
        for changes, message in (
            ({"ops": ("softmax",)}, "ops"),
            ({"implementation": "fast"}, "implementation"),
            ({"geometry": "huge"}, "geometry"),
            ({"batch": 0}, "batch"),
            ({"tiny.span": 100}, "tiny: span"),
            ({"tiny.dtype": "float8"}, "tiny: dtype"),
            ({"tiny.heads": 0}, "tiny: heads"),
            ({"flash.width": 0.5}, r"flash.width=0\.5: a whole number"),
            ({"copy_bytes": 0}, "copy_bytes"),
            ({"matmul": 4}, "matmul"),
            ({"seed": -1}, "seed"),
            ({"tokens": ()}, "tokens"),
            ({"workdir": ""}, "workdir"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                self.config(**changes).check()

    def test_tuning_takes_the_fastest_that_the_device_takes(self):
        config = self.config()
        geometry, (tokens,) = config.of("cpu")
        for platform in ("tpu", "cuda"):
            cases = list(Cases(geometry, 1, tokens, 0).of("indexer"))[:1]
            tried = []

            def measure(case, tiles, tried=tried):
                tried.append(tiles)
                if len(tried) == 1:
                    raise NotImplementedError("too large")
                return 1.0 / len(tried)

            old = {"other": {"op": {"key": {"tile": 1}}}}
            table, (row,) = tune.tune(iter(cases), platform, "chip", old, measure)
            self.assertEqual(table["other"], old["other"])
            (op,) = table["chip"]
            self.assertEqual(op, row["op"])
            module = tune.SPACES["indexer", platform][0]
            (found,) = table["chip"][op].values()
            self.assertEqual(module.Tiles(**found), tried[-1])
            self.assertLen(row["seconds"], len(tried) - 1)
            path = pathlib.Path(config.workdir) / "table.json"
            tuning.save(table, path)
            self.assertEqual(tuning.load(path), table)

    def test_there_is_nothing_to_tune_on_a_cpu(self):
        with self.assertRaisesRegex(ValueError, "no kernels run on 'cpu'"):
            tune.main(self.config())


if __name__ == "__main__":
    absltest.main()
