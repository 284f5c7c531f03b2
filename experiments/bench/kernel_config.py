"""What `bench_kernels` and `tune` measure: sizes of a model, contexts, and how long it may take."""

import dataclasses

from experiments import config_checks
from hetero_kv.kernels import dispatch
from models.checks import DTYPES

OPS = ("decode_attention", "indexer", "chunk_attention", "compressor", "page_copy")
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}  # of JAX's backends
KERNELS = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}


@dataclasses.dataclass(kw_only=True)
class Geometry:
    """Sizes of one model's attention; `tokens` is that of one sequence."""

    heads: int = 64
    width: int = 512
    window: int = 128
    index_heads: int = 64
    index_dim: int = 128
    topk: int = 512
    csa_ratio: int = 4
    hca_ratio: int = 128
    chunk: int = 256  # queries of a prefill call
    layers: int = 2  # stacked; calls take turns, so that a cache of the chip holds none whole
    span: int = 1024  # tokens of a page
    dtype: str = "bfloat16"

    def check(self) -> None:
        """Raises ValueError where sizes do not fit together."""
        config_checks.check_types(self)
        sizes = (x.name for x in dataclasses.fields(self) if x.name != "dtype")
        config_checks.at_least(self, 1, *sizes)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {DTYPES}")
        for ratio in (self.csa_ratio, self.hca_ratio):
            if ratio < 2 or self.span % ratio:
                raise ValueError(f"span={self.span} must be a multiple of the ratios, not {ratio}")


def tiny() -> Geometry:
    """Small enough for a CPU."""
    return Geometry(
        heads=4,
        width=128,
        window=16,
        index_heads=8,
        index_dim=64,
        topk=16,
        hca_ratio=32,
        chunk=64,
        span=256,
    )


@dataclasses.dataclass(kw_only=True)
class KernelBenchConfig:
    """One run."""

    ops: tuple[str, ...] = OPS
    flash: Geometry = dataclasses.field(default_factory=Geometry)
    tiny: Geometry = dataclasses.field(default_factory=tiny)
    geometry: str = "auto"  # "flash", "tiny"; auto: tiny on a CPU
    tokens: tuple[int, ...] = (65_536, 1_048_576)  # contexts; a CPU takes a 64th of each
    batch: int = 4  # sequences
    implementation: str = "auto"  # auto: the kernels of this device, or only the reference
    interpret: bool = True  # on a CPU: check the TPU kernels, interpreted, at the first context
    inner: int = 10  # calls in one timed program
    repeats: int = 5
    case_seconds: float = 4.0  # no further repeat of a case is begun after so long
    seconds: float = 240.0  # no further case is begun after so long
    copy_bytes: int = 1 << 29  # of the measured copy; a CPU takes a 16th
    matmul: int = 4096  # side of the measured product; a CPU takes an 8th
    seed: int = 0
    workdir: str = "runs/bench_kernels"
    table: str = ""  # `tune` only: the table to write; default the package's

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        if not self.ops or set(self.ops) - set(OPS):
            raise ValueError(f"ops={self.ops} must be one or more of {OPS}")
        if self.geometry not in ("auto", "flash", "tiny"):
            raise ValueError(f"geometry={self.geometry!r} must be auto, flash or tiny")
        if self.implementation not in dispatch.IMPLEMENTATIONS:
            raise ValueError(
                f"implementation={self.implementation!r}: use one of {dispatch.IMPLEMENTATIONS}"
            )
        config_checks.not_empty(self, "tokens")
        config_checks.at_least(self, 1, "tokens", "batch", "inner", "repeats")
        # A CPU takes a part of these, and one number or row of it must be left.
        config_checks.at_least(self, 64, "copy_bytes")
        config_checks.at_least(self, 8, "matmul")
        config_checks.at_least(self, 0, "case_seconds", "seconds", "seed")
        config_checks.check_parts(self, "flash", "tiny")
        config_checks.check_workdir(self)

    def of(self, platform: str) -> tuple[Geometry, tuple[int, ...]]:
        """The geometry and the contexts on this platform."""
        small = self.geometry == "tiny" or (self.geometry == "auto" and platform == "cpu")
        geometry = self.tiny if small else self.flash
        contexts = [max(1, x // (64 if platform == "cpu" else 1)) for x in self.tokens]
        # Whole pages, and one more token so that the last group is not yet closed.
        return geometry, tuple(-(-x // geometry.span) * geometry.span for x in contexts)
