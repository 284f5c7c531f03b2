"""Checkpoints of large state: sizes, directions, and a run end to end."""

import pathlib

import pytest

from configs import admission as config_file
from experiments import admission, admission_report


def test_sizes_are_those_of_the_paper_s_model() -> None:
    spec = admission.hybrid(config_file.get_config(), 128, 32)
    assert spec.block_bytes() == 32 * 4 * 2 * 4_096 * 2
    assert spec.checkpoint_bytes() == 24 * 8_192 * 128 * 2
    plain = admission.hybrid(config_file.get_config(), 0, 32)
    assert plain.checkpoint_bytes() == 0 and plain.block_bytes() == spec.block_bytes()


def test_directions(tmp_path: pathlib.Path) -> None:
    config = config_file.get_config()
    config.trace.limit, config.refine, config.workdir = 150, 8, str(tmp_path)
    config.state_dims, config.capacities, config.orders = (128, 0), (0.3,), ("lru",)
    results = admission.run(config)
    assert len(results["cells"]) == 4
    claims = {x.name.partition(",")[0]: x for x in admission_report.exhibit(results).claims}
    assert claims["D3: token hits"].found >= 2
    assert claims["D3: the same without recurrent layers: no gap"].found == pytest.approx(1)
    assert (tmp_path / "admission.png").stat().st_size


@pytest.mark.parametrize(
    "field, value",
    [("attention_layers", 0), ("state_dims", ()), ("capacities", (0.0,)), ("orders", ("x",)),
     ("refine", 3), ("refine", 0), ("placements", ()), ("parameters", 0.0), ("workdir", "")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(field: str, value: object) -> None:
    config = config_file.get_config()
    setattr(config, field, value)
    with pytest.raises(ValueError):
        admission.run(config)
