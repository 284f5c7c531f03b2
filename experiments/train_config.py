"""The configuration of a training run, and its form as JSON."""

import dataclasses
from collections.abc import Mapping

from experiments import config_checks, config_tools, tasks
from models import config as model_config

# Fields that change neither the parameters a step produces nor the rows that are logged: a run may
# be resumed under other values of these, and of nothing else.
FREE_FIELDS = ("workdir", "checkpoint_every", "keep", "tensorboard", "export", "export_dtype")
EXPORT_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig:
    """Warm-up, then cosine to `final_scale`, after clipping by the global norm."""

    name: str = "adamw"  # or "muon": matrices by Muon, everything else by AdamW
    learning_rate: float = 3e-3  # peak
    warmup_steps: int = 100
    final_scale: float = 0.0  # learning rate of the last step over the peak
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.98
    clip_norm: float = 1.0  # 0: no clipping


@dataclasses.dataclass(kw_only=True)
class IndexerConfig:
    """How the indexer learns which entries the attention would have used.

    The hard top-k passes no gradient, so its only teacher is the KL divergence from the attention
    (DeepSeek-V3.2, section 2.1.1). Steps run in three phases: dense (every visible entry is
    attended), indexer only (still dense, all else frozen), then sparse.
    """

    kl_weight: float = 1.0  # 0: the indexer keeps its random weights
    learning_rate: float = 0.0  # peak; 0: the optimizer's
    dense_steps: int = 0
    frozen_steps: int = 0  # indexer-only steps after the dense ones


@dataclasses.dataclass(kw_only=True)
class TrainConfig:
    """One training run; everything in it is overridable from the command line."""

    model: model_config.DecoderConfig = dataclasses.field(
        default_factory=model_config.DecoderConfig
    )
    task: tasks.Task = dataclasses.field(default_factory=tasks.Recall)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    indexer: IndexerConfig = dataclasses.field(default_factory=IndexerConfig)

    seed: int = 0  # of the initial parameters and of the order of the data
    init_from: str = ""  # an exported checkpoint to start from; "": random parameters
    steps: int = 1_500
    target_accuracy: float = 0.0  # stop at the first evaluation that reaches it; 0: never
    eval_every: int = 50
    log_every: int = 10

    workdir: str = "runs/train"
    checkpoint_every: int = 100
    keep: int = 2  # checkpoints kept
    tensorboard: bool = False
    export: str = (
        ""  # where the final parameters go, as <export>.safetensors and .json; "": nowhere
    )
    export_dtype: str = "float32"

    def check(self) -> None:
        """Raises ValueError where the fields do not fit together."""
        config_checks.check_types(self)
        self.task.check()
        if self.task.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"{self.task.vocab_size=} > {self.model.vocab_size=}: raise model.vocab_size"
            )
        if self.optimizer.name not in ("adamw", "muon"):
            raise ValueError(f"{self.optimizer.name=} is neither adamw nor muon")
        if self.export_dtype not in EXPORT_DTYPES:
            raise ValueError(f"{self.export_dtype=} is not one of {EXPORT_DTYPES}")
        counts = ("steps", "eval_every", "log_every", "checkpoint_every", "keep")
        config_checks.at_least(self, 1, *counts)
        config_checks.at_least(self, 0, "seed", "target_accuracy")
        if self.target_accuracy > 1:
            raise ValueError(f"target_accuracy={self.target_accuracy} is a share of answers: <= 1")
        rates = ("learning_rate", "warmup_steps", "final_scale", "weight_decay", "clip_norm")
        config_checks.at_least(self.optimizer, 0, *rates, "b1", "b2")
        if max(self.optimizer.b1, self.optimizer.b2) >= 1:
            raise ValueError(f"{self.optimizer.b1=} and {self.optimizer.b2=} are means' decay: < 1")
        steps = ("dense_steps", "frozen_steps")
        config_checks.at_least(self.indexer, 0, "kl_weight", "learning_rate", *steps)
        config_checks.check_workdir(self)


def to_dict(config: TrainConfig) -> dict:
    """The configuration as JSON values; the task carries its registered name."""
    values = config_tools.to_dict(config)
    values["task"] = {"name": tasks.name_of(config.task), **values["task"]}
    return values


def from_dict(values: Mapping) -> TrainConfig:
    """Inverse of `to_dict`; unknown fields are errors that name near matches."""
    values = dict(values)
    task = dict(values.pop("task"))
    name = task.pop("name")
    if name not in tasks.TASKS:
        raise ValueError(f"unknown task {name!r}; known tasks: {sorted(tasks.TASKS)}")
    config = config_tools.from_dict(TrainConfig, values)
    config.task = config_tools.from_dict(tasks.TASKS[name], task)
    return config
