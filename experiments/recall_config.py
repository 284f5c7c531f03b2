"""What `recall` trains and measures."""

import dataclasses

from experiments import config_checks, tasks, train_config

ROWS = ("B1", "B2", "B3", "B4", "B5", "B6", "B7")


@dataclasses.dataclass(kw_only=True)
class RecallConfig:
    """Rows B1 to B7; every arm is `base` with a few fields changed.

    base: the hybrid of a window layer and a CSA layer on aligned facts.
    """

    base: train_config.TrainConfig = dataclasses.field(default_factory=train_config.TrainConfig)
    rows: tuple[str, ...] = ROWS
    seeds: int = 3
    jobs: int = 1  # trainings at a time, each on cores of its own
    hca_ratio: int = 8  # B1
    state: tuple[int, int] = (16, 16)  # B1: key and value channels of a recurrent head
    ratios: tuple[int, ...] = (2, 4, 8)  # B2: tokens per entry
    overlap_ratios: tuple[int, ...] = (2,)  # B2: also with overlap
    picks: tuple[int, ...] = (1, 2, 4, 8, 16)  # B3: entries picked
    pick_batches: int = 8  # B3, B4: of the held-out set
    warm_dense: int = 250  # B4: steps
    warm_frozen: int = 50
    warm_sparse: int = 100
    border_steps: int = 1_000  # B5: of the misaligned arms, which leave their plateau late
    windows: tuple[int, ...] = (0, 4)  # B6: of the CSA layer, beside base's
    distances: tuple[int, ...] = (4, 8, 12, 16, 24, 32, 40)  # B7
    induction_steps: int = 2_500  # B7: after 400 nothing copies far yet
    workdir: str = "runs/recall"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        self.base.check()
        if not isinstance(self.base.task, tasks.Recall):
            raise ValueError(f"base.task={self.base.task} is not recall")
        if unknown := [x for x in self.rows if x not in ROWS]:
            raise ValueError(f"rows={unknown} are none of {ROWS}")
        config_checks.not_empty(self, "rows", "ratios", "picks", "distances")
        config_checks.at_least(self, 1, "seeds", "jobs", "pick_batches", "picks", "state")
        config_checks.at_least(self, 1, "ratios", "overlap_ratios", "hca_ratio", "distances")
        config_checks.at_least(self, 1, "warm_dense", "warm_frozen", "warm_sparse", "border_steps")
        config_checks.at_least(self, 1, "induction_steps")
        config_checks.at_least(self, 0, "windows")
        if self.base.model.layer_types != ("swa", "csa"):
            raise ValueError("base.model.layer_types must be swa, csa: arms are changes of it")
        if "B4" in self.rows and self.warm_dense < self.base.log_every:
            raise ValueError(
                f"warm_dense={self.warm_dense} < {self.base.log_every=}: B4 reads the accuracy of "
                "the dense steps in the log; raise the one or lower the other"
            )
        config_checks.check_workdir(self)
