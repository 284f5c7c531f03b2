"""Finds the fastest tile sizes of the kernels on the device at hand and writes the tuning table.

    python -m experiments.tune [--config.ops=indexer] [--config.table=my_table.json]

An entry of the table holds for one kind of device, op and bucket of shapes; others stay.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from experiments import cli
from experiments.bench import kernels
from experiments.bench.kernel_cases import Case, Cases
from experiments.bench.kernel_config import KERNELS, KernelBenchConfig
from hetero_kv.kernels import tuning
from hetero_kv.kernels.chunk_attention import pallas_tpu as chunk_tpu
from hetero_kv.kernels.decode_attention import pallas_gpu as decode_gpu
from hetero_kv.kernels.decode_attention import pallas_tpu as decode_tpu
from hetero_kv.kernels.indexer import pallas_gpu as index_gpu
from hetero_kv.kernels.indexer import pallas_tpu as index_tpu

# By op and platform: the kernel's module, and the sizes to try for each field of its Tiles.
SPACES = {
    ("chunk_attention", "tpu"): (chunk_tpu, dict(queries=(8, 16, 32), entries=(128, 256, 512))),
    ("decode_attention", "tpu"): (decode_tpu, dict(entries=(128, 256, 512), picks=(64, 128))),
    ("decode_attention", "cuda"): (decode_gpu, dict(splits=(0, 8, 16, 32, 64), stages=(2,))),
    ("indexer", "tpu"): (index_tpu, dict(entries=(512, 1024, 2048))),
    ("indexer", "cuda"): (index_gpu, dict(chunk=(2048, 4096, 8192, 16384))),
}


def candidates(op: str, platform: str) -> Iterator[Any]:
    """All tile sizes to try."""
    module, space = SPACES[op, platform]
    for values in itertools.product(*space.values()):
        yield module.Tiles(**dict(zip(space, values, strict=True)))


def key(case: Case, platform: str) -> str:
    """The bucket of the case in the table."""
    module = SPACES[case.op, platform][0]
    return module.key(case.operands, *([case.k] if module is index_gpu else []))


def best(tiles: Iterator[Any], measure: Callable[[Any], float]) -> tuple[Any, dict[str, float]]:
    """The fastest, and the seconds of all that a device takes; (None, {}) where it takes none."""
    times = {}
    for candidate in tiles:
        try:
            times[candidate] = measure(candidate)
        except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError):
            continue  # too large for this device
    if not times:
        return None, {}
    named = {str(dataclasses.asdict(x)): seconds for x, seconds in times.items()}
    return min(times, key=times.get), named


def tune(
    cases: Iterator[Case], platform: str, kind: str, table: dict, measure: Callable
) -> tuple[dict, list[dict]]:
    """The table with the best of every case, and a report. measure(case, tiles) -> seconds."""
    report = []
    for case in cases:
        found, times = best(candidates(case.op, platform), functools.partial(measure, case))
        name = f"{case.op}/{KERNELS[platform]}"
        report.append({"op": name, "case": case.name, "best": str(found), "seconds": times})
        if found is not None:
            table = tuning.note(table, kind, name, key(case, platform), found)
    return table, report


def main(config: KernelBenchConfig) -> None:
    """Tunes and writes the table."""
    config.check()
    platform = kernels.platform()
    if platform not in KERNELS:
        raise ValueError(f"no kernels run on {platform!r}: run this on a GPU or TPU")
    geometry, contexts = config.of(platform)

    def measure(case: Case, tiles: Any) -> float:
        def run(layer: jax.Array, arrays: Any) -> Any:
            return case.run(layer, arrays, KERNELS[platform], tiles)

        return kernels.seconds(run, case.arrays, geometry.layers, config, case.keep)[0]

    cases = (
        case
        for tokens in contexts
        for op in config.ops
        if (op, platform) in SPACES
        for case in Cases(geometry, config.batch, tokens, config.seed).of(op)
    )
    path = pathlib.Path(config.table) if config.table else tuning.PATH
    table = tuning.load(path) if path.exists() else {}
    table, report = tune(cases, platform, jax.devices()[0].device_kind, table, measure)
    tuning.save(table, path)
    for row in report:
        print(f"{row['op']}, {row['case']}: {row['best']}")
    print(f"written to {path}")


if __name__ == "__main__":
    cli.run(main, default="configs/bench_kernels.py")
