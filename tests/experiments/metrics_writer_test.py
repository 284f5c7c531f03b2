"""The metrics files: complete, exact, and consistent after a kill."""

import csv
import pathlib
import tempfile

from absl.testing import absltest

from experiments import metrics_writer


class MetricsWriterTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.dir = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def write(self, rows, **options):
        with metrics_writer.MetricsWriter(self.dir, **options) as writer:
            for step, scalars in rows:
                writer.write(step, scalars)

    def files(self):
        return [(self.dir / name).read_bytes() for name in ("metrics.jsonl", "metrics.csv")]

    def test_jsonl_and_csv_hold_the_same_numbers_with_all_digits(self):
        self.write([(1, {"loss": 1 / 3}), (2, {"loss": 0.1, "eval_loss": 2e-30})])
        rows = metrics_writer.read(self.dir / "metrics.jsonl")
        self.assertEqual(
            rows, [{"step": 1, "loss": 1 / 3}, {"step": 2, "loss": 0.1, "eval_loss": 2e-30}]
        )
        table = list(csv.DictReader((self.dir / "metrics.csv").open()))
        self.assertEqual(list(table[0]), ["step", "loss", "eval_loss"])
        numbers = [{k: float(v) for k, v in line.items() if v} for line in table]
        self.assertEqual(numbers, rows)

    def test_resuming_drops_later_rows_and_a_torn_one(self):
        rows = [(step, {"loss": 1 / step}) for step in range(1, 7)]
        rows[4][1]["eval_loss"] = 0.5
        self.write(rows)
        whole = self.files()
        with (self.dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "lo')
        self.write(rows[3:], resume_step=3)
        self.assertEqual(self.files(), whole)

    def test_a_row_is_on_disk_after_flush(self):
        writer = metrics_writer.MetricsWriter(self.dir)
        writer.write(1, {"loss": 1.0})
        writer.flush()
        self.assertLen(metrics_writer.read(self.dir / "metrics.jsonl"), 1)
        writer.close()

    def test_tensorboard_only_if_asked(self):
        self.write([(1, {"loss": 1.0})])
        self.assertFalse((self.dir / "tensorboard").exists())
        self.write([(1, {"loss": 1.0})], tensorboard=True)
        self.assertNotEmpty(list((self.dir / "tensorboard").glob("events*")))


if __name__ == "__main__":
    absltest.main()
