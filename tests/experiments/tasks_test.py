"""Tasks: batches depend on step and seed alone, and ask only what can be known."""

import itertools

import numpy as np
from absl.testing import absltest, parameterized

from experiments import tasks
from experiments.tasks import corpus

SMALL = {
    "recall": tasks.Recall(batch_size=4, length=64, pairs=4, gap=16, vocab=32, eval_batches=2),
    "scattered": tasks.Recall(batch_size=4, stride=4, slots=16, noise_symbols=8, eval_batches=2),
    "text": tasks.Text(batch_size=2, length=64, eval_batches=2),
    "needle": tasks.Needle(batch_size=2, length=256, eval_batches=2),
    "induction": tasks.Induction(batch_size=4, length=64, distances=(8, 24), eval_batches=2),
}
EACH = [{"testcase_name": name, "task": task} for name, task in SMALL.items()]


class EveryTaskTest(parameterized.TestCase):
    @parameterized.named_parameters(EACH)
    def test_batches_have_the_promised_shapes_and_ids(self, task):
        task.check()
        for batch in [task.batch(3), *task.evaluate()]:
            shape = (task.batch_size, task.length)
            for name, dtype in [("tokens", "int32"), ("targets", "int32"), ("weights", "float32")]:
                self.assertEqual((batch[name].shape, batch[name].dtype), (shape, dtype))
            self.assertBetween(batch["tokens"].min(), 0, task.vocab_size - 1)
            self.assertLess(batch["tokens"].max(), task.vocab_size)
            self.assertLess(batch["targets"].max(), task.vocab_size)
            self.assertGreater(batch["weights"].sum(), 0)

    @parameterized.named_parameters(EACH)
    def test_a_batch_is_a_function_of_step_and_seed(self, task):
        again = task.batch(5, 1)
        self.assertSame(task.batch(5, 1), again)
        for other in (task.batch(6, 1), task.batch(5, 2)):
            self.assertFalse(np.array_equal(other["tokens"], again["tokens"]))

    @parameterized.named_parameters(EACH)
    def test_held_out_batches_repeat_and_differ_from_training(self, task):
        first, second = list(task.evaluate()), list(task.evaluate())
        for a, b in zip(first, second, strict=True):
            self.assertSame(a, b)
        self.assertFalse(np.array_equal(first[0]["tokens"], task.batch(0)["tokens"]))

    def assertSame(self, a, b):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


class RecallTest(parameterized.TestCase):
    @parameterized.parameters("recall", "scattered")
    def test_every_target_is_the_value_written_behind_the_key(self, name):
        task = SMALL[name]
        batch = task.batch(0)
        start = task.document_length
        for tokens, targets, weights in zip(*batch.values(), strict=True):
            document = tokens[:start].tolist()
            np.testing.assert_array_equal(np.flatnonzero(weights), np.arange(start, task.length))
            for key, value in zip(tokens[start:], targets[start:], strict=True):
                self.assertEqual(document.count(key), 1)
                self.assertEqual(document[document.index(key) + 1], value)

    def test_the_gap_and_the_offset_hold_no_fact(self):
        task = tasks.Recall(offset=3, gap=32)
        for tokens in task.batch(0)["tokens"]:
            facts = np.flatnonzero(tokens[: task.document_length] < task.vocab // 2)
            self.assertEqual(facts.min(), 3)
            self.assertEqual(facts.max(), 3 + task.stride * (task.pairs - 1))

    def test_noise_of_its_own_alphabet(self):
        task = SMALL["scattered"]
        document = task.document(np.random.default_rng(0))
        facts = set(document.facts) | set(document.facts.values())
        noise = [token for token in document.tokens.tolist() if token not in facts]
        self.assertGreaterEqual(min(noise), task.vocab)

    def test_documents_of_a_wanted_length_and_their_questions(self):
        task = tasks.Recall()
        rng = np.random.default_rng(1)
        document = task.document(rng, length=96)
        self.assertLen(document.tokens, 96)
        self.assertLen(document.facts, task.pairs)
        queries, answers = task.questions(rng, document, 16)
        self.assertEqual([document.facts[q] for q in queries.tolist()], answers.tolist())

    @parameterized.parameters(
        ({"stride": 1}, "stride"),
        ({"slots": 4}, "slots"),
        ({"pairs": 40}, "pairs"),
        ({"gap": 112}, "no room"),
    )
    def test_impossible_settings_are_refused(self, fields, message):
        with self.assertRaisesRegex(ValueError, message):
            tasks.Recall(**fields).check()
        with self.assertRaisesRegex(ValueError, "do not fit"):
            tasks.Recall().document(np.random.default_rng(0), length=15)


class CorpusTest(absltest.TestCase):
    def test_files_are_split_whole_and_in_path_order(self):
        files = [(f"pkg/m{i}.py", b"x = %d\n" % i) for i in range(200)]
        built = corpus.build(reversed(files))
        self.assertCountEqual([*itertools.chain(*built.files.values())], files)
        self.assertEqual(list(built.files["train"]), sorted(built.files["train"]))
        self.assertBetween(len(built.files["train"]), 160, 195)
        joined = b"\n\n".join(content for _, content in built.files["val"])
        self.assertEqual(built.text("val").tobytes(), joined)

    def test_the_digest_sees_content_and_paths(self):
        base = corpus.build([("a.py", b"12"), ("b.py", b"3")])
        self.assertEqual(base.digest, corpus.build([("b.py", b"3"), ("a.py", b"12")]).digest)
        for other in ([("a.py", b"1"), ("b.py", b"23")], [("a.py", b"12"), ("c.py", b"3")]):
            self.assertNotEqual(base.digest, corpus.build(other).digest)

    def test_the_standard_library_is_large_and_leaves_out_tests_and_packages(self):
        built = corpus.stdlib()
        self.assertGreater(len(built.text("train")), 4_000_000)
        for path, _ in itertools.chain(*built.files.values()):
            self.assertNotRegex(path, r"(^|/)(test|site-packages|encodings/)")

    def test_documents_come_from_one_split(self):
        task = tasks.Text()
        paths = [path for path, tokens in task.documents("test", 512) if len(tokens) == 512]
        self.assertNotEmpty(paths)
        self.assertEqual({corpus.split_of(path) for path in paths}, {"test"})


class TextTest(absltest.TestCase):
    def test_targets_are_the_next_bytes(self):
        batch = SMALL["text"].batch(0)
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
        self.assertIn(bytes(batch["tokens"][0].astype(np.uint8)), self.train())

    def train(self) -> bytes:
        return corpus.stdlib().text("train").tobytes()


class NeedleTest(parameterized.TestCase):
    @parameterized.parameters(-1.0, 0.0, 0.5, 1.0)
    def test_the_asked_digits_stand_in_a_needle(self, depth):
        task = tasks.Needle(batch_size=2, length=256, depth=depth, needles=2, questions=3)
        task.check()
        batch = task.batch(0)
        for tokens, targets, weights in zip(*batch.values(), strict=True):
            text = bytes(tokens[: task.text_length].astype(np.uint8))
            asked = np.flatnonzero(weights).reshape(task.questions, task.digits)
            for places in asked:
                code = bytes(targets[places].astype(np.uint8))
                question = bytes(tokens[places[0] - 2 : places[0] + 1].astype(np.uint8))
                self.assertRegex(code, rb"^\d+$")
                self.assertRegex(question, rb"^# [A-Z]$")
                self.assertIn(question + code + b"\n", text)

    def test_the_first_steps_are_short_and_have_as_many_bytes(self):
        task = tasks.Needle(batch_size=4, length=256, needles=2, questions=3, digits=1,
                            text_weight=0.1, short_steps=5, short_length=64)  # fmt: skip
        task.check()
        for step, shape in ((0, (16, 64)), (4, (16, 64)), (5, (4, 256))):
            batch = task.batch(step)
            self.assertEqual({x.shape for x in batch.values()}, {shape})
            self.assertEqual((batch["weights"] == 1).sum(), 3 * shape[0])
        self.assertEqual({x["tokens"].shape for x in task.evaluate()}, {(4, 256)})

    @parameterized.parameters(20, 300)
    def test_a_short_length_that_does_not_fit(self, length):
        task = tasks.Needle(length=256, needles=2, questions=3, digits=1, short_steps=5,
                            short_length=length)  # fmt: skip
        with self.assertRaisesRegex(ValueError, "short_length"):
            task.check()


class InductionTest(absltest.TestCase):
    def test_what_is_asked_was_seen_one_distance_ago(self):
        task = SMALL["induction"]
        batch = task.at(24)
        for tokens, targets, weights in zip(*batch.values(), strict=True):
            asked = np.flatnonzero(weights)
            self.assertEqual(asked[0], 24)
            np.testing.assert_array_equal(tokens[asked - 23], targets[asked])


if __name__ == "__main__":
    absltest.main()
