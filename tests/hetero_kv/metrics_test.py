"""Counters and histograms: exact under threads, and a text form that any reader understands."""

import json
import math
import re
import threading

import pytest

from hetero_kv.metrics import Counters, Family, series, to_json, to_text

FAMILIES = {
    "a_total": Family("counter", "Things.\nAnd \\ more."),
    "took_seconds": Family("histogram", "How long."),
    "level": Family("gauge", "How much."),
}
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"')


def parse(text):
    """An independent reader of the format: {family: (type, help, {(name, labels): value})}."""
    assert text.endswith("\n")
    families, current = {}, None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, told = line.split(" ", 3)
            assert name not in families
            families[name], current = ["untyped", told, {}], name
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind in ("counter", "gauge", "histogram", "untyped")
            assert name == current or name not in families
            families.setdefault(name, ["", "", {}])[0] = kind
            current = name
        else:
            name, labels, value = SAMPLE.fullmatch(line).groups()
            pairs, at = [], 0
            for match in LABEL.finditer(labels or ""):
                assert match.start() == at or labels[at : match.start()] == ","
                raw = re.sub(r"\\(.)", lambda x: {"n": "\n"}.get(x[1], x[1]), match[2])
                pairs.append((match[1], raw))
                at = match.end()
            assert at == len(labels or "")
            kind, _, samples = families[current]
            parts = ("", "_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            assert name in [current + x for x in parts]
            key = name, tuple(sorted(pairs))
            assert key not in samples
            samples[key] = float(value)
    return families


def test_counts_are_exact_under_threads():
    counters = Counters()
    handle = counters.bind("a_total", of="handle")
    histogram = counters.histogram("took_seconds", (1.0, 2.0))
    start, each = threading.Barrier(8), 4000

    def work(number):
        start.wait()
        for i in range(each):
            counters.add("a_total", of="name")
            counters.add("a_total", 2, of=f"thread {number}")
            handle.add()
            histogram.observe(float(i % 4))

    threads = [threading.Thread(target=work, args=(x,)) for x in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.get("a_total", of="name") == handle.value == 8 * each
    assert all(counters.get("a_total", of=f"thread {x}") == 2 * each for x in range(8))
    assert histogram.counts == [4 * each, 2 * each, 2 * each]  # 0 and 1, 2, 3
    assert histogram.total == 8 * each * 1.5


def test_labels_in_any_order_are_one_series():
    counters = Counters("x_")
    counters.add("a_total", 1, b="1", c="2")
    counters.add("a_total", 2, c="2", b="1")
    assert counters.bind("a_total", c="2", b="1") is counters.bind("a_total", b="1", c="2")
    assert counters.snapshot() == {'x_a_total{b="1",c="2"}': 3}
    assert counters.get("a_total", c="2", b="1") == 3 and counters.get("other_total") == 0


def test_a_value_on_a_bound_falls_under_it():
    histogram = Counters().histogram("took_seconds", (0.1, 1.0))
    for value, count in ((0.1, 1), (0.10001, 2), (1.0, 3), (7.0, 4)):
        histogram.observe(value, count)
    assert histogram.samples("t", {"k": "v"}) == {
        't_bucket{k="v",le="0.1"}': 1,
        't_bucket{k="v",le="1.0"}': 6,
        't_bucket{k="v",le="+Inf"}': 10,
        't_sum{k="v"}': pytest.approx(0.1 + 0.20002 + 3 + 28),
        't_count{k="v"}': 10,
    }
    for bounds in ((2.0, 1.0), (1.0, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="bounds"):
            Counters().histogram("t", bounds)


def test_the_text_can_be_read_back():
    counters = Counters("x_")
    odd = 'a "quoted" \\ back\nslash {brace}, comma=1'
    counters.add("a_total", 3, kind=odd, other="")
    counters.add("a_total", 4, kind="plain", other="")
    counters.add("unknown_sum", 1)
    counters.histogram("took_seconds", (1e-5, 0.5), kind="z").observe(0.25, 2)
    level = {"level": 0.5, series("level", of="x"): math.inf, "level_sum": 2}
    snapshot = counters.snapshot() | counters.named(level)
    found = parse(to_text(snapshot, FAMILIES, "x_"))
    assert {x: y[0] for x, y in found.items()} == {
        "x_a_total": "counter",
        "x_level": "gauge",
        "x_level_sum": "untyped",  # a gauge has no parts
        "x_took_seconds": "histogram",
        "x_unknown_sum": "untyped",
    }
    assert found["x_a_total"][1] == "Things.\\nAnd \\\\ more."
    assert found["x_a_total"][2] == {
        ("x_a_total", (("kind", odd), ("other", ""))): 3,
        ("x_a_total", (("kind", "plain"), ("other", ""))): 4,
    }
    samples = found["x_took_seconds"][2].items()
    buckets = {dict(y)["le"]: n for (x, y), n in samples if x.endswith("_bucket")}
    assert buckets == {"1e-05": 0, "0.5": 2, "+Inf": 2}
    assert found["x_level"][2]["x_level", (("of", "x"),)] == math.inf


def test_a_line_of_json():
    counters = Counters()
    counters.add("a_total", 3, kind='"')
    line = to_json(counters.snapshot(), 12.5)
    assert line.count("\n") == 1 and line.endswith("\n")
    assert json.loads(line) == {"time": 12.5, "metrics": {'a_total{kind="\\""}': 3}}
