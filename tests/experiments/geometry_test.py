"""Sizes of released models against figures of their papers, or counted by hand."""

import dataclasses

import pytest

from configs import geometry as geometry_config
from experiments.geometry import GIB, describe, text

WINDOW = 127  # tokens of a V4 window but the current one


@pytest.mark.parametrize(
    "name, parameters, gib, replay",
    [
        ("v4_flash", 284e9, 6.72, 43 * WINDOW),  # DeepSeek-V4 report, abstract; layers * (W - 1)
        ("v4_pro", 1.6e12, 9.62, 61 * WINDOW),
        ("v3_2", 671e9, 61 * 2 * (512 + 64 + 128) / 1024, 0),  # KiB a token: GiB at 2^20
        ("gemma3_27b", 27e9, 10 * 2 * 2 * 16 * 128 / 1024, 52 * 1023),
        ("gpt_oss_120b", 117e9, 18 * 2 * 2 * 8 * 64 / 1024, 18 * WINDOW),
        ("qwen3_next_80b", 80e9, 12 * 2 * 2 * 2 * 256 / 1024, -1),  # a state cannot be replayed
        ("qwen3_5_9b", 9e9, 8 * 2 * 2 * 4 * 256 / 1024, -1),
        ("qwen3_5_35b", 35e9, 10 * 2 * 2 * 2 * 256 / 1024, -1),
    ],
)
def test_released_models(name: str, parameters: float, gib: float, replay: int) -> None:
    found = describe(geometry_config.get_config(name))
    assert found["parameters"] == pytest.approx(parameters, rel=0.03)
    assert found["history_bytes_per_token"] * (1 << 20) / GIB == pytest.approx(gib, abs=0.006)
    assert found["exact_replay"] == replay
    assert found["block_bytes"] == 128 * found["history_bytes_per_token"]
    parts = found["cache_bytes_by_component"]
    assert found["cache_bytes"] == sum(parts.values()) + 8  # and two lengths
    assert text(found).startswith(f"{name}: ")


def test_v4_state_of_one_position() -> None:
    """Windows in bfloat16, raw rows in float32, counted from the report's sizes."""
    found = describe(geometry_config.get_config("v4_pro"))
    layers, csa, hca, width, index = 61, 30, 31, 512, 128
    windows = layers * 128 * (2 * width + 4)  # rows and their positions
    sparse = 8 * (4 * 2 * 2 * width + 4) + 8 * (4 * 2 * 2 * index + 4)
    heavy = 128 * (4 * 2 * width + 4)
    assert found["checkpoint_bytes"] == windows + csa * sparse + hca * heavy


def test_qwen_state_of_one_position() -> None:
    """A float32 matrix a head, and the last inputs of its convolution in bfloat16."""
    found = describe(geometry_config.get_config("qwen3_next_80b"))
    channels = (2 * 16 + 32) * 128
    assert found["checkpoint_bytes"] == 36 * (32 * 128 * 128 * 4 + 4 * (channels * 2 + 4))


def test_v4_1_keeps_no_windows_and_replays_one() -> None:
    flash, later = (describe(geometry_config.get_config(x)) for x in ("v4_flash", "v4_1_flash"))
    assert later["checkpoint_bytes"] == 0 < flash["checkpoint_bytes"]
    assert (flash["replay"], later["replay"]) == (0, 128)
    same = ("parameters", "history_bytes_per_token", "block_bytes", "exact_replay")
    assert [flash[x] for x in same] == [later[x] for x in same]


def test_against_v3_2() -> None:
    """Both in bfloat16: V4's report has 10 % and 7 % with quantised caches."""
    base = describe(geometry_config.get_config("v3_2"))["history_bytes_per_token"]
    for name, share in (("v4_pro", 0.115), ("v4_flash", 0.080)):
        found = describe(geometry_config.get_config(name))["history_bytes_per_token"]
        assert found / base == pytest.approx(share, abs=0.002)


def test_another_context_and_name() -> None:
    config = dataclasses.replace(geometry_config.get_config("v4_pro"), context=1 << 14)
    assert describe(config)["cache_bytes"] < GIB
    with pytest.raises(ValueError, match="v4_pro"):
        geometry_config.get_config("v5")


@pytest.mark.parametrize(
    "field, value", [("context", -5), ("context", 0), ("context", 1.5), ("policy", "often")]
)
def test_what_makes_no_sense_is_named(field: str, value: object) -> None:
    config = dataclasses.replace(geometry_config.get_config("v3_2"), **{field: value})
    with pytest.raises(ValueError, match=field if field == "context" else "often"):
        describe(config)
