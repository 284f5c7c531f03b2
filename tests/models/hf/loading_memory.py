"""How much memory loading a checkpoint takes: a program that loads one and tells its peak.

    python -m tests.models.hf.loading_memory DIRECTORY [keep]

The library is loaded in a process of its own, whose peak of resident memory is reset before.
"""

import contextlib
import json
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np

from models import build, hf
from models.hf import shards
from models.hf.family import Family
from tests.models import families

ROOT = pathlib.Path(__file__).parents[3]
EXPERTS, WIDE, INNER = 8, 512, 256  # of a layer: 8 experts of 3 x 512 x 256
SEED = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)


def make(directory: pathlib.Path, nbytes: int, quantised: bool = False) -> None:
    """A DeepSeek-V4 of about so many bytes, bfloat16, in shards with an index.

    Two kinds of layers in turns, so that the leaves of all layers are two stacks. quantised: routed
    experts are e2m1, as in the release (then as many layers make a smaller checkpoint).
    """
    layer = 2 * 3 * EXPERTS * WIDE * INNER
    count = 2 * max(round(nbytes / layer / 2), 1)
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    fields = json.loads((families.GOLDENS / "smallest" / "config.json").read_text()) | {
        "dtype": "bfloat16",
        "hidden_size": WIDE,
        "moe_intermediate_size": INNER,
        "n_routed_experts": EXPERTS,
        "num_hidden_layers": count,
        "layer_types": kinds * (count // 2),
        "mlp_layer_types": ["moe"] * count,
    }
    family = hf.family(fields["model_type"])
    tensors = _tensors(family, fields, quantised)
    sizes = {name: shards.bytes_of(*about) for name, about in tensors.items()}
    directory.mkdir(parents=True)
    shards.write(
        directory, sizes, lambda names: ((n, value(n, *tensors[n])) for n in names), 16 << 20
    )
    if quantised:
        fields |= {"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp4"}
    (directory / "config.json").write_text(json.dumps(fields))


def _tensors(family: Family, fields: dict, quantised: bool) -> dict[str, tuple[tuple, np.dtype]]:
    """Shape and dtype by name, experts one by one."""
    found = {}
    for weight in family.weights(build(family.parse(fields))):
        for choices in weight.choices:
            for part in choices[-1]:
                if quantised and ".experts." in part.name:
                    rows, columns = part.shape
                    found[part.name] = (rows, columns // 2), np.dtype(np.int8)
                    scales = f"{part.name}_scale_inv"
                    found[scales] = (rows, columns // 32), shards.DTYPES["F8_E8M0"]
                else:
                    found[part.name] = part.shape, weight.dtype
    return found


def value(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """What the tensor of a name holds: known again when it has been read."""
    size = int(np.prod(shape))
    noise = np.resize(np.roll(SEED, hash_of(name)), size).reshape(shape)
    if dtype.itemsize == 1:
        return (noise * 8 + 120).astype(np.uint8).view(dtype)
    return noise.astype(dtype)


def hash_of(name: str) -> int:
    """The same in every process."""
    return sum(i * ord(c) for i, c in enumerate(name, 1)) % len(SEED)


def measure(directory: pathlib.Path, keep: bool = False) -> dict[str, Any]:
    """What the program below says of a directory."""
    command = [sys.executable, "-m", "tests.models.hf.loading_memory", str(directory)]
    done = subprocess.run(
        command + ["keep"] * keep, cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _status(name: str) -> int:
    """A size of this process from the kernel, bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith(f"{name}:"))


def main(directory: str, keep: bool) -> dict[str, Any]:
    """Loads and measures.

    before, peak: resident bytes. params: bytes of the parameters. reports: calls of the callback;
    reported: bytes in the last one.
    """
    hf.plan_pretrained(directory, keep_quantised=keep)  # modules and backend are there
    jax.block_until_ready(jax.device_put(np.ones(3)))
    with contextlib.suppress(OSError):  # where it fails the peak so far counts: more, never less
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, seen, began = _status("VmRSS"), [], time.monotonic()
    _, params = hf.from_pretrained(directory, keep_quantised=keep, progress=seen.append)
    jax.block_until_ready(params)
    return {
        "before": before,
        "peak": _status("VmHWM"),
        "peak_of_process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "params": sum(x.nbytes for x in jax.tree.leaves(params)),
        "seconds": time.monotonic() - began,
        "reports": len(seen),
        "tensors": seen[-1].all_tensors,
        "reported": seen[-1].nbytes,
        "files": len({x.file for x in seen}),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], "keep" in sys.argv[2:])) + "\n")
