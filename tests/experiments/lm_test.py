"""The language-model rows: arms, claims on results made up by hand, and a run end to end."""

import pathlib

import jax
import numpy as np
import pytest

import models
from configs import lm as config_file
from experiments import (
    config_tools,
    exhibit,
    lm,
    lm_arms,
    lm_claims,
    lm_probe,
    lm_report,
    tasks,
    trained_models,
    training,
)
from experiments.lm_arms import GLOBAL, LOCAL

STRETCHES = ("all", "0-31", "32-127", "128-255")
CONFIG = config_file.get_config()


def made(bits: float | tuple[float, ...], needle: float = 1.0, **more: object) -> dict:
    """An arm of one seed; bits of every stretch, or one number for all."""
    bits = bits if isinstance(bits, tuple) else (bits,) * 4
    grid = {str(n): {f"{d:g}": needle for d in CONFIG.depths} for n in CONFIG.lengths}
    common = {"steps": 600, "eval_accuracy": 0.5, "parameters": 1000, "cache_bytes": 1000}
    return {
        "0": {**common, "bits": dict(zip(STRETCHES, bits, strict=True)), "needle": grid, **more}
    }


def verdicts(rows: dict, xz: float = 4.0) -> list[str]:
    config = lm.config_tools.to_dict(CONFIG)
    config["base"] = lm.train_config.to_dict(CONFIG.base)
    results = {"config": config, "xz": {"stream": 1.5, "windows": xz}, "rows": rows}
    shown = lm_report.exhibit(results)
    assert all(len(row) == len(x.columns) for x in shown.tables for row in x.rows)
    return [x.verdict for x in shown.claims]


def test_every_arm_can_be_built_and_rows_share_models() -> None:
    rows = {row.name: row.arms for row in lm_arms.rows(CONFIG)}
    assert list(rows) == list(CONFIG.rows)
    digests = {}
    for name, arms in rows.items():
        for label, arm in arms.items():
            arm.check()
            models.build(arm.model)
            digests[name, label] = trained_models.digest(arm)
    assert len({digests[x, GLOBAL] for x in ("C1", "C3", "C4", "C6", "C7")}) == 1
    assert digests["C1", "3:1"] == digests["C2", "W = 32, no sink"]
    assert digests["C4", "all CSA"] == digests["C5", "all CSA"] == digests["B6", "W = 32"]
    assert len(set(digests.values())) == 13


def test_claims_of_ratios() -> None:
    rows = {
        GLOBAL: made((2.5, 2.9, 2.5, 2.3)),
        "1:1": made((2.52, 2.9, 2.5, 2.34)),
        "3:1": made((2.6, 2.9, 2.6, 2.5)),
        LOCAL: made((2.6, 2.91, 2.6, 2.5), needle=0.12),
    }
    held, missed, mute = exhibit.REPRODUCED, exhibit.NOT, exhibit.UNTESTED
    assert verdicts({"C1": rows}) == [held, missed, held, held, held, held, held, missed]
    assert verdicts({"C1": rows}, xz=2.4)[-2:] == [missed, missed]
    # Ratios say nothing where windows do as well, nor a needle that full attention does not find.
    rows[LOCAL] = made((2.4, 2.9, 2.3, 2.2), needle=0.12)
    assert verdicts({"C1": rows})[:4] == [mute, mute, missed, held]
    rows[GLOBAL] = made((2.5, 2.9, 2.5, 2.3), needle=0.4)
    assert verdicts({"C1": rows})[4:6] == [exhibit.DIRECTION, mute]


def test_claims_of_sinks() -> None:
    rows = {
        f"W = {w}, {kind}": made(bits, attention={
            "first": first, "sink_full": 0.1, "sink_local": 0.1, "largest": 3.0})
        for w, kind, bits, first in ((8, "no sink", 2.6, 0.2), (8, "sink", 2.55, 0.05),
                                     (32, "no sink", 2.5, 0.1), (32, "sink", 2.6, 0.11))
    }  # fmt: skip
    held, missed = exhibit.REPRODUCED, exhibit.NOT
    # An even share of a sink is 0.12 in windows of 8, and 0.04 in windows of 32.
    assert verdicts({"C2": rows}) == [held, missed, held, missed, held, missed]
    # Nothing is moved off a token that has no more than an even share, 0.02 of 256.
    rows["W = 8, no sink"]["0"]["attention"]["first"] = 0.019
    assert verdicts({"C2": rows})[0] == exhibit.UNTESTED


def test_a_needle_of_any_name() -> None:
    rng = np.random.default_rng(0)
    digits = rng.integers(0, 10, (100_000, 4))
    assert lm_claims.blind_pick(4) == pytest.approx((digits[:, 0] == digits[np.arange(
        len(digits)), rng.integers(0, 4, len(digits))]).mean(), abs=0.01)  # fmt: skip
    assert lm_claims.blind_pick(1) == 1


def test_claims_of_streams_and_sparse_attention() -> None:
    def bits(late: float) -> dict:
        return dict(zip(STRETCHES, (2.5, 2.5, 2.5, late), strict=True))

    metrics = {"bits": {"full": bits(2.3), "window": bits(2.38), "first": bits(2.35)}}
    rows = {"C3": {GLOBAL: {"0": metrics}}}
    assert verdicts(rows) == [exhibit.DIRECTION, exhibit.UNTESTED]
    metrics["bits"]["window"] = bits(2.41)
    assert verdicts(rows) == [exhibit.DIRECTION, exhibit.REPRODUCED]
    rows = {GLOBAL: made(2.5), "all NSA": made(2.51, 0.96), "all CSA": made(2.6, 0.5)}
    held, mute = exhibit.REPRODUCED, exhibit.UNTESTED
    assert verdicts({"C4": rows}) == [held, held, exhibit.NOT, exhibit.NOT]
    rows[GLOBAL] = made(2.5, 0.54)
    assert verdicts({"C4": rows}) == [held, held, exhibit.NOT, held]
    rows[GLOBAL] = made(2.5, 0.4)
    assert verdicts({"C4": rows}) == [held, mute, exhibit.NOT, mute]
    ratios = {GLOBAL: made(2.5), "1:1": made(2.5), LOCAL: made(2.5)}
    assert verdicts({"C1": ratios, "C4": rows})[-4:] == [mute] * 4


def test_claims_of_turns_longer_text_keys_and_windows() -> None:
    rows = {"all CSA": made(2.4, cache_bytes=3_000), "CSA, HCA": made(2.48, cache_bytes=2_000),
            "all HCA": made(2.6, cache_bytes=1_000)}  # fmt: skip
    assert verdicts({"C5": rows}) == [exhibit.REPRODUCED] * 2
    rows["CSA, HCA"] = made(2.51, 0.7, cache_bytes=2_000)
    rows["all HCA"] = made(2.6, 0.5, cache_bytes=1_000)
    assert verdicts({"C5": rows}) == [exhibit.NOT] * 2

    def longer(last: float, needle: float, trained: float = 1.0) -> dict:
        bits = {**dict.fromkeys(STRETCHES, 2.3), "256-511": 2.3, "512-1023": last}
        shares = {"256": trained, "512": 1.0, "1024": needle}
        grid = {length: {"0": share, "1": share} for length, share in shares.items()}
        return {"0": {"steps": 600, "bits": bits, "needle": grid}}

    rows = {GLOBAL: longer(2.9, 0.1), "1:1": longer(2.8, 0.1), "CSA, HCA": longer(2.5, 0.5),
            "1:1, full without positions": longer(2.4, 0.2)}  # fmt: skip
    assert verdicts({"C6": rows}) == [exhibit.REPRODUCED, exhibit.DIRECTION]
    rows[GLOBAL] = longer(2.9, 0.1, trained=0.4)
    assert verdicts({"C6": rows}) == [exhibit.REPRODUCED, exhibit.UNTESTED]

    def keys(one: float, four: float) -> dict:
        return {"0": {"needle": {"1": one, "4": four}}}

    rows = {GLOBAL: keys(1.0, 0.9), "1:1": keys(0.91, 0.92), LOCAL: keys(0.1, 0.3),
            "CSA, HCA": keys(0.92, 1.0), "other": keys(0.4, 0.1)}  # fmt: skip
    held = exhibit.REPRODUCED
    assert verdicts({"C7": rows}) == [held, held, exhibit.NOT, exhibit.UNTESTED]
    rows = {"W = 32": made(2.5), "W = 0": made(2.52)}
    assert verdicts({"B6": rows}) == [exhibit.DIRECTION]


def small() -> lm.LmConfig:
    config = config_file.get_config()
    base = config.base
    base.task = tasks.Needle(batch_size=2, length=64, needles=1, questions=1, eval_batches=1,
                             text_weight=0.1)  # fmt: skip
    base.model = base.model.replace(
        d_model=16, d_ff=16, n_heads=2, n_kv_heads=2, head_dim=8, rope_dim=8, window=8,
        index_heads=2, index_dim=8, layer_types=("full",) * 2, mlp_types=("dense",) * 2,
    )  # fmt: skip
    base.steps, base.eval_every, base.indexer.dense_steps = 4, 4, 4
    config.edges, config.lengths, config.depths = (8, 32), (48, 64), (0.0, 1.0)
    config.text_batches = config.grid_batches = config.seeds = 1
    return config


def test_padding_changes_nothing() -> None:
    config = small()
    model = config.base.model.replace(layer_types=("csa", "full"))
    params = models.build(model).init(jax.random.key(0))
    batch = tasks.Text(batch_size=3, length=40).batch(0)  # two, and one with a row of padding
    nats, hit = lm_probe.Probe(model, 2, 64)(params, batch)
    logits = jax.nn.log_softmax(models.build(model).forward(params, batch["tokens"]))
    wanted = -np.take_along_axis(np.asarray(logits), batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(nats, wanted, atol=1e-5)
    np.testing.assert_array_equal(hit, np.argmax(logits, -1) == batch["targets"])


def test_longer_text_is_measured_by_stretch_and_needles_by_length_and_depth() -> None:
    config = small()
    config.rows, config.longer, config.grid_batches = ("C6",), 2, 3
    (row,) = lm_arms.rows(config)
    made = row.arms[GLOBAL]
    made.model = made.model.replace(layer_types=("local",), mlp_types=("dense",))
    params = models.build(made.model).init(jax.random.key(0))
    names = ("steps", "stopped", "eval_accuracy", "steps_to_95", "parameters", "chance")
    found = row.measure(made, training.TrainResult(params, dict.fromkeys(names), []))
    assert list(found["bits"]) == ["all", "0-7", "8-31", "32-63", "64-127"]
    assert {n: set(of) for n, of in found["needle"].items()} == {
        n: {"0", "1"} for n in ("64", "128")
    }
    # Two batches of two questions of four digits a point.
    assert all(16 * share % 1 == 0 for of in found["needle"].values() for share in of.values())


@pytest.mark.full
def test_a_run_end_to_end(tmp_path: pathlib.Path) -> None:
    config = small()
    config.rows, config.workdir = ("C3", "B6"), str(tmp_path)
    found = lm.run(config)
    assert 0 < found["xz"]["stream"] < found["xz"]["windows"]
    bits = found["rows"]["C3"][GLOBAL]["0"]["bits"]
    assert set(bits) == {"full", "window", "first"}
    assert set(bits["full"]) == {"all", "0-7", "8-31", "32-63"}
    # Of the first eight bytes, a window of eight has everything.
    assert bits["window"]["0-7"] == pytest.approx(bits["full"]["0-7"], abs=1e-5)
    assert set(found["rows"]["B6"]["W = 0"]["0"]["needle"]["48"]) == {"0", "1"}
    for name in ("C3.csv", "B6.csv", "report.md", "results.json"):
        assert (tmp_path / name).stat().st_size
    assert lm.run(config) == found


@pytest.mark.parametrize(
    "field, value, told",
    [
        ("rows", ("C9",), "rows="),
        ("seeds", 0, "seeds=0"),
        ("edges", (128, 32), "edges="),
        ("edges", (256,), "edges="),
        ("edges", (32.5,), "edges=.*32.5 is not a whole number"),
        ("edges", (), "edges="),
        ("lengths", (0,), "lengths="),
        ("lengths", (512,), "lengths="),
        ("lengths", (9,), "C1: .*10 bytes of needles and questions"),
        ("depths", (2.0,), "depths="),
        ("depths", (), "depths="),
        ("keys", (1,), "keys=.*two counts at least"),
        ("keys", (4, 1), "keys=.*must rise"),
        ("keys", (1, 40), "C7: .*names are letters"),
        ("nsa", (8, 4, 16), "nsa=.*4 values are needed, not 3"),
        ("nsa", (8, 4, 16, 0), "nsa="),
        ("nsa", (8, 3, 16, 4), "C4, arm all NSA"),
        ("stream_first", -1, "stream_first=-1"),
        ("small_window", 0, "small_window=0"),
        ("longer", 0, "longer=0"),
        ("longer", 1 << 20, "C6: longer=1048576: .*held out"),
        ("base.task.questions", 0, "questions=0"),
        ("workdir", "", "workdir"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(
    field: str, value: object, told: str, tmp_path: pathlib.Path
) -> None:
    config = config_file.get_config()
    config.workdir = str(tmp_path / "run")
    if told[0] == "C":
        config.rows = (told[:2],)
    config_tools.override(config, {field: value})
    with pytest.raises(ValueError, match=told):
        lm.run(config)
    assert not (tmp_path / "run").exists()


def test_depths_without_the_beginning_claim_nothing_of_it() -> None:
    config = config_tools.to_dict(CONFIG) | {"depths": [0.5]}
    config["base"] = lm.train_config.to_dict(CONFIG.base)
    arms = {arm: made(2.5) for arm in (GLOBAL, "1:1", LOCAL)}
    for arm in arms.values():
        arm["0"]["needle"] = {str(n): {"0.5": 1.0} for n in CONFIG.lengths}
    results = {"config": config, "xz": {"stream": 1.5, "windows": 4.0}, "rows": {"C1": arms}}
    names = [x.name for x in lm_report.exhibit(results).claims]
    assert len(names) == 6 and not any("farthest" in x for x in names)
