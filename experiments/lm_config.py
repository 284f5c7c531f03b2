"""What `lm` trains and measures."""

import dataclasses

from experiments import config_checks, tasks, train_config

ROWS = ("C1", "C2", "C3", "C4", "C5", "C6", "C7", "B6")


@dataclasses.dataclass(kw_only=True)
class LmConfig:
    """Rows C1 to C7, and B6 on text; every arm is `base` with a few fields changed.

    base: full attention in all layers, on text with needles in it.
    """

    base: train_config.TrainConfig = dataclasses.field(default_factory=train_config.TrainConfig)
    rows: tuple[str, ...] = ROWS
    seeds: int = 3
    jobs: int = 1  # trainings at a time, each on cores of its own
    small_window: int = 8  # C2
    nsa: tuple[int, int, int, int] = (8, 4, 16, 4)  # C4: span, stride, select, top
    stream_first: int = 4  # C3: tokens kept from the beginning
    longer: int = 4  # C6: times the length that was trained
    edges: tuple[int, ...] = (32, 128)  # positions at which buckets begin, beside 0
    text_batches: int = 8  # of base's batch size
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    lengths: tuple[int, ...] = (64, 128, 256)  # of needle sequences, bytes
    grid_batches: int = 3  # a point of the grid
    keys: tuple[int, ...] = (1, 4)  # C7: needles, one of which is asked for
    workdir: str = "runs/lm"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        self.base.check()
        task, model = self.base.task, self.base.model
        if not isinstance(task, tasks.Needle):
            raise ValueError(f"base.task={task} is not needle")
        if set(model.layer_types) != {"full"} or len(model.layer_types) % 2:
            raise ValueError("base.model.layer_types must be full, an even number of times")
        if unknown := [x for x in self.rows if x not in ROWS]:
            raise ValueError(f"rows={unknown} are none of {ROWS}")
        config_checks.not_empty(self, "rows", "lengths", "depths")
        config_checks.at_least(self, 1, "seeds", "jobs", "text_batches", "grid_batches", "longer")
        config_checks.at_least(self, 1, "small_window", "nsa", "lengths", "keys")
        config_checks.at_least(self, 0, "stream_first")
        if not self.edges or list(self.edges) != sorted({*self.edges}) or self.edges[0] <= 0:
            raise ValueError(f"edges={self.edges} must rise from above 0")
        if self.edges[-1] >= task.length:
            raise ValueError(f"edges={self.edges} must lie below {task.length=}")
        if max(self.lengths) > task.length:
            raise ValueError(f"lengths={self.lengths} are at most {task.length=}")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths={self.depths} lie in 0..1")
        if len(self.keys) < 2 or list(self.keys) != sorted({*self.keys}):
            raise ValueError(
                f"keys={self.keys} must rise, two counts at least: C7 compares the first and the "
                "last, as in keys=1,4"
            )
        config_checks.check_workdir(self)
