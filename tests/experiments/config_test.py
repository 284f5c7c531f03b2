"""Configurations: overrides by path, JSON and back, clear errors."""

import pathlib
import subprocess
import sys

from absl.testing import absltest, parameterized

from experiments import cli, config_tools, tasks, train_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECALL = str(ROOT / "configs" / "train_recall.py")
CONTROL = str(ROOT / "configs" / "train_demo_recall.py") + ":control"
CONFIGS = [*sorted(str(path) for path in (ROOT / "configs").glob("train_*.py")), CONTROL]


class OverrideTest(parameterized.TestCase):
    def test_nested_fields_are_set_in_place(self):
        config = config_tools.load(RECALL)
        same = config_tools.override(config, {"model.window": 8, "steps": 7, "task.pairs": 4})
        self.assertIs(same, config)
        self.assertEqual((config.model.window, config.steps, config.task.pairs), (8, 7, 4))

    @parameterized.parameters(
        ("model.windoww", "unknown field model.windoww; did you mean window"),
        ("task.gaps", "unknown field task.gaps; did you mean gap"),
        ("stepz", "unknown field stepz; did you mean steps"),
        ("steps.a", "unknown field steps.a; it has no fields"),
        ("model.zzz", "known fields: vocab_size"),
    )
    def test_unknown_fields_name_near_matches(self, path, message):
        with self.assertRaisesRegex(config_tools.UnknownFieldError, message):
            config_tools.override(config_tools.load(RECALL), {path: 1})
        with self.assertRaisesRegex(config_tools.UnknownFieldError, message):
            cli.prepare(["main", f"--config={RECALL}", f"--config.{path}=1"], RECALL)

    @parameterized.parameters(
        ("--config.model.layer_types=swa,full", "--config.model.layer_types=('swa', 'full')"),
        ("--config.model.layer_types=('swa',)", "--config.model.layer_types=('swa',)"),
        ("--config.workdir=a,b", "--config.workdir=a,b"),
        ("--config.tensorboard", "--config.tensorboard"),
        ("--verbosity=1", "--verbosity=1"),
    )
    def test_tuples_may_be_written_without_quotes(self, given, passed):
        self.assertEqual(cli.prepare([given], RECALL), [passed])

    def test_a_word_after_the_file_reaches_get_config(self):
        self.assertEqual(config_tools.load(CONTROL).model.layer_types, ("full", "full"))
        flag = f"--config={CONTROL}"
        self.assertEqual(cli.prepare([flag], RECALL), [flag])

    def test_a_missing_file_is_named(self):
        with self.assertRaisesRegex(ValueError, "--config=none.py: no such file"):
            cli.prepare(["main", "--config=none.py"], RECALL)
        with self.assertRaisesRegex(ValueError, "--config=none.py: no such file"):
            cli.prepare(["main", "--config", "none.py"], RECALL)


class JsonTest(parameterized.TestCase):
    @parameterized.parameters(CONFIGS)
    def test_every_training_configuration_is_consistent_and_round_trips(self, path):
        config = config_tools.load(path)
        config.check()
        values = train_config.to_dict(config)
        self.assertEqual(train_config.from_dict(values), config)
        self.assertEmpty(config_tools.differences(values, train_config.to_dict(config)))

    def test_unknown_fields_and_tasks_are_refused(self):
        values = train_config.to_dict(train_config.TrainConfig())
        with self.assertRaisesRegex(ValueError, "Recall.pears; did you mean pairs"):
            train_config.from_dict({**values, "task": {"name": "recall", "pears": 8}})
        with self.assertRaisesRegex(ValueError, "unknown task 'recal'"):
            train_config.from_dict({**values, "task": {"name": "recal"}})

    def test_differences_are_dotted_paths(self):
        left = {"a": 1, "b": {"c": 2, "d": 3}}
        self.assertEqual(
            config_tools.differences(left, {"a": 1, "b": {"c": 4}, "e": 5}), ["b.c", "b.d", "e"]
        )

    @parameterized.parameters(
        ({"model.vocab_size": 32}, "model.vocab_size"),
        ({"optimizer.name": "sgd"}, "sgd"),
        ({"eval_every": 0}, "eval_every"),
        ({"workdir": ""}, "workdir"),
        ({"export_dtype": "int8"}, "int8"),
        ({"task.gap": 200}, "no room"),
    )
    def test_inconsistent_values_are_refused(self, changes, message):
        config = config_tools.override(config_tools.load(RECALL), changes)
        with self.assertRaisesRegex(ValueError, message):
            config.check()


class CommandLineTest(absltest.TestCase):
    def test_flags_reach_the_configuration(self):
        code = (
            "from experiments import cli; cli.run(lambda c: print(c.model.window, c.steps, "
            f"c.model.layer_types, c.optimizer.learning_rate), default={RECALL!r})"
        )
        flags = [
            "--config.model.window=8",
            "--config.steps=7",
            "--config.model.layer_types=swa,full",
            "--config.optimizer.learning_rate=1e-3",
        ]
        self.assertEqual(self.run_code(code, flags).stdout, "8 7 ('swa', 'full') 0.001\n")
        failed = self.run_code(code, ["--config.stepz=7"])
        self.assertEqual(failed.returncode, 1)
        self.assertEndsWith(failed.stderr, "unknown field stepz; did you mean steps?\n")

    def run_code(self, code, flags):
        return subprocess.run(
            [sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True
        )


class NameTest(absltest.TestCase):
    def test_tasks_know_their_names(self):
        self.assertEqual(tasks.name_of(tasks.Text()), "text")
        with self.assertRaisesRegex(ValueError, "known tasks"):
            tasks.name_of(object())


if __name__ == "__main__":
    absltest.main()
