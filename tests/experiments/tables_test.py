"""The counted tables: every claim within its margin, at the published sizes."""

import json

import pytest

from configs import tables as config_file
from experiments import exhibit, tables, tables_report, tables_rows
from experiments.tables_config import Price


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    config = config_file.get_config()
    config.workdir, config.requests = str(tmp_path_factory.mktemp("tables")), 200
    found = tables.run(config)
    stored = json.loads((tmp_path_factory.getbasetemp() / config.workdir / "results.json")
                        .read_text())  # fmt: skip
    assert stored == found
    return found


def test_every_claim_is_reproduced(results: dict) -> None:
    claims = tables_report.exhibit(results).claims
    assert len(claims) == 14
    assert {x.name: x.verdict for x in claims} == {x.name: exhibit.REPRODUCED for x in claims}


def test_published_sizes(results: dict) -> None:
    kv = results["kv"]
    base = kv["v3_2"]["packed_total"]
    assert base / kv["v4_pro"]["packed_total"] == pytest.approx(9.5, rel=0.02)
    assert base / kv["v4_flash"]["packed_total"] == pytest.approx(13.7, rel=0.02)
    assert kv["v4_pro"]["bf16_total"] / (1 << 30) == pytest.approx(9.62, rel=0.005)
    assert kv["v4_pro"]["packed_total"] / kv["gqa8"]["bf16_total"] == pytest.approx(0.02, abs=1e-3)
    # 61 layers of 8 keys and 8 values of 128 channels, two bytes each; and the counters.
    assert kv["gqa8"]["bf16_total"] == 61 * (2 * 8 * 128 * 2 * (1 << 20) + 4) + 8
    for name in ("v4_pro", "v4_flash"):
        assert 7 <= kv[name]["window_bytes_per_token"] / kv[name]["packed_per_token"] <= 8


def test_mixes_follow_the_formula(results: dict) -> None:
    n = results["config"]["ratio_context"]
    for mix, row in results["ratios"]["mixes"].items():
        local = int(mix.partition(":")[0])
        for window, ratio in row.items():
            share = 1 / (local + 1)
            wanted = 1 / (share + (1 - share) * int(window) / n)
            assert ratio == pytest.approx(wanted, rel=1e-3)  # positions of ring rows


def test_prices() -> None:
    price = Price("p", 2.0, 0.5, "then")
    assert tables_rows.saved_share(price, 0.4) == pytest.approx(0.3)
    # 1,000 bytes at $1 a GB and hour are 1e-6 dollars an hour; a reuse saves 1.5e-6.
    assert tables_rows.rent_break_even(price, 1_000, 1.0) == pytest.approx(1 / 1.5)


@pytest.mark.parametrize(
    "field, value",
    [
        ("convention", "fp16"), ("ratio_layers", 20), ("context", 0), ("shortest", 10**6),
        ("hit", 1.5), ("prices", (Price("p", 1, 2, ""),)), ("prices", (Price("p", 1, 1, ""),)),
        ("ratio_layers", 0), ("contexts", ()), ("median", 0.0), ("seed", -1), ("block", 100),
        ("workdir", ""),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(field: str, value: object) -> None:
    config = config_file.get_config()
    setattr(config, field, value)
    with pytest.raises(ValueError):
        tables.run(config)
