"""Traces: the reader, its errors, and how close the generator comes to what it imitates."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from experiments import traces

SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared" / "traces"


def published(name: str) -> traces.Trace:
    """A published trace, where it is at hand."""
    path = SHARED / f"mooncake_{name}.jsonl"
    if not path.is_file():
        raise absltest.SkipTest(f"{path.name} is not here")
    return traces.load(str(path))


class MooncakeTest(parameterized.TestCase):
    def write(self, *lines: object) -> str:
        text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
        return self.file(text + "\n")

    def file(self, text: str = "") -> str:
        directory = self.enterContext(tempfile.TemporaryDirectory())
        path = pathlib.Path(directory) / "trace.jsonl"
        path.write_text(text)
        return str(path)

    def line(self, **changes: object) -> dict:
        values = {"timestamp": 2500, "input_length": 1025, "output_length": 9}
        return {**values, "hash_ids": [4, 5, 6], **changes}

    def test_fields(self):
        trace = traces.load(self.write(self.line(), self.line(timestamp=0)))
        first, second = trace.requests
        self.assertEqual((first.arrival_s, second.arrival_s), (0.0, 2.5))  # in order of arrival
        self.assertEqual((second.n_in, second.n_out, second.block_ids), (1025, 9, (4, 5, 6)))
        self.assertEqual(trace.unique_blocks(), 3)
        self.assertLen(traces.load(self.write(self.line(), self.line()), limit=1).requests, 1)

    def test_keys_count_the_last_part_or_drop_it(self):
        (request,) = traces.load(self.write(self.line())).requests
        whole, seen = request.keys(partial=True), request.keys(partial=False)
        self.assertEqual((len(whole.keys), whole.length), (3, 3 * 512 + 1))
        self.assertEqual((len(seen.keys), seen.length), (2, 1025))
        self.assertEqual(whole.keys[:2], seen.keys)

    @parameterized.parameters(
        "{",
        "[]",
        {"input_length": 0, "hash_ids": []},
        {"hash_ids": [1, 2]},
        {"hash_ids": ["x", "y", "z"]},
        {"hash_ids": [1, 2, -3]},
        {"input_length": None},
    )
    def test_a_bad_line_is_named(self, bad="", **changes):
        path = self.write(self.line(), bad or self.line(**changes))
        with self.assertRaisesRegex(ValueError, ":2: "):
            traces.load(path)

    def test_missing_and_empty_files(self):
        with self.assertRaisesRegex(ValueError, "no such file"):
            traces.load("none.jsonl")
        with self.assertRaisesRegex(ValueError, "no requests"):
            traces.load(self.file("\n"))

    def test_what_is_saved_is_read_back(self):
        trace = traces.generate(traces.GeneratorConfig(requests=50))
        path = self.file()
        traces.save(trace, path)
        again = traces.load(path)
        self.assertEqual(
            [(x.n_in, x.n_out, x.block_ids) for x in again.requests],
            [(x.n_in, x.n_out, x.block_ids) for x in trace.requests],
        )

    @parameterized.parameters(
        ("conversation", 12_031, 0.366, 0.374), ("synthetic", 3_993, 0.640, 0.651)
    )
    def test_published_statistics(self, name, requests, blocks, tokens):
        found = traces.statistics_of(published(name))
        self.assertEqual(found["requests"], requests)
        self.assertAlmostEqual(found["ideal_blocks"], blocks, delta=0.001)
        self.assertAlmostEqual(found["ideal_tokens"], tokens, delta=0.001)


class GeneratorTest(parameterized.TestCase):
    def test_finer_blocks(self):
        trace = traces.generate(traces.GeneratorConfig(requests=60))
        fine = traces.refine(trace, 8)
        self.assertEqual(fine.block_size, 64)
        found, whole = traces.statistics_of(fine), traces.statistics_of(trace)
        self.assertEqual(found["input_mean"], whole["input_mean"])
        for request in fine.requests:
            self.assertLen(request.block_ids, -(-request.n_in // 64))
        # The last, partial block of a prompt was shared with nobody.
        self.assertAlmostEqual(found["ideal_tokens"], whole["ideal_tokens"])
        with self.assertRaises(ValueError):
            traces.refine(trace, 7)

    def test_a_conversation_is_calibrated(self):
        trace = traces.generate(traces.GeneratorConfig())
        found = traces.statistics_of(trace)
        for name, want, delta in (
            ("requests", 12_031, 0),
            ("ideal_tokens", 0.374, 0.02),
            ("ideal_blocks", 0.366, 0.02),
            ("used_once", 0.758, 0.03),
            ("top_tenth_of_reuses", 0.751, 0.05),
            ("input_median", 6_909, 700),
            ("input_mean", 12_035, 1_200),
            ("gap_median_s", 114, 15),
            ("gap_p90_s", 519, 80),
        ):
            self.assertAlmostEqual(found[name], want, delta=delta, msg=name)
        self.assertEqual({x.block_ids[0] for x in trace.requests}, {0})

    def test_agents_share_hot_prompts(self):
        trace = traces.generate(traces.agent_config(requests=6_000))
        found = traces.statistics_of(trace)
        self.assertAlmostEqual(found["ideal_tokens"], 0.59, delta=0.03)
        self.assertLen({x.block_ids[0] for x in trace.requests}, 3)
        self.assertLessEqual(max(x.n_out for x in trace.requests), 40)

    def test_ids_are_chained_and_seeds_decide(self):
        config = traces.GeneratorConfig(requests=400, seed=3)
        trace = traces.generate(config)
        parents: dict[int, int] = {}
        for request in trace.requests:
            self.assertLen(request.block_ids, -(-request.n_in // request.block_size))
            for parent, block in zip((-1, *request.block_ids), request.block_ids, strict=False):
                self.assertEqual(parents.setdefault(block, parent), parent)
        self.assertEqual(traces.generate(config).digest, trace.digest)
        other = traces.GeneratorConfig(requests=400, seed=4)
        self.assertNotEqual(traces.generate(other).digest, trace.digest)

    @parameterized.parameters({"kind": "chat"}, {"requests": 0}, {"turns": 1.0}, {"follow": -0.1})
    def test_what_makes_no_sense_is_refused(self, **fields):
        with self.assertRaises(ValueError):
            traces.generate(traces.GeneratorConfig(**fields))


if __name__ == "__main__":
    absltest.main()
