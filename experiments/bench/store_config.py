"""What `bench_store` measures. A part is a module of `experiments.bench` with `run(config)`."""

import dataclasses

from experiments import config_checks
from experiments.bench import bench_config
from experiments.bench.control_plane import ControlPlaneConfig
from experiments.bench.disk_bench import DiskConfig
from experiments.bench.restore_bench import RestoreConfig

MIB = 1 << 20


@dataclasses.dataclass(kw_only=True)
class StoreBenchConfig:
    """One run. Each part's configuration is the field of its name."""

    parts: tuple[str, ...] = ("control_plane", "disk_bench", "restore_bench")
    control_plane: ControlPlaneConfig = dataclasses.field(default_factory=ControlPlaneConfig)
    disk_bench: DiskConfig = dataclasses.field(default_factory=DiskConfig)
    restore_bench: RestoreConfig = dataclasses.field(default_factory=RestoreConfig)
    workdir: str = "runs/bench_store"
    quick: bool = False  # a smoke run, in `workdir`/quick

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        names = [x.name for x in dataclasses.fields(self)]
        known = [x for x in names if dataclasses.is_dataclass(getattr(self, x))]
        if not self.parts or set(self.parts) - set(known):
            raise ValueError(f"parts={self.parts} must be one or more of {known}")
        config_checks.check_parts(self, *self.parts)
        config_checks.check_parts(self.effective(), *self.parts)
        config_checks.check_workdir(self)

    def effective(self) -> "StoreBenchConfig":
        """This configuration, or its quick form."""
        if not self.quick:
            return self
        small = dataclasses.replace(self.control_plane, prompts=60, prefixes=5, repeats=1)
        disk = dataclasses.replace(
            self.disk_bench,
            object_bytes=(64 << 10,),
            total_bytes=2 * MIB,
            group_bytes=MIB,
            capacity_bytes=256 * MIB,
            repeats=1,
            seconds=1.0,
        )
        tiny = bench_config.small().model.replace(chunk=64, scan_layers=True)
        restore = dataclasses.replace(
            self.restore_bench,
            small=tiny,
            sizes=("small",),
            length=256,
            block=64,
            prefixes=2,
            repeats=1,
            seconds=1.0,
        )
        return dataclasses.replace(
            self,
            control_plane=small,
            disk_bench=disk,
            restore_bench=restore,
            workdir=f"{self.workdir}/quick",
            quick=False,
        )
