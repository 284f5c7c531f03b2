"""Configuration of the main job: who asks what, under which store, in which reuse modes."""

import dataclasses

from experiments import config_checks
from hetero_kv.prefix.policy import Policy

SCENARIOS = ("recall", "text", "control")
KINDS = ("recall", "text")
MODES = ("off", "hash_only", "hash_only_zeroed", "validated")


@dataclasses.dataclass(kw_only=True)
class Scenario:
    """One model and the requests it serves.

    A request is a document (shared, drawn by popularity) followed by a question of its own.
    """

    name: str = "recall"
    kind: str = "recall"  # "recall": answers are known; "text": the cold run's answer is the truth
    checkpoint: str = "experiments/checkpoints/recall_hybrid"
    train_config: str = "configs/train_demo_recall.py:hybrid"  # makes the checkpoint anew
    requests: int = 240
    documents: int = 16
    document_tokens: int = 128  # a multiple of the chunk, so that whole documents can be resumed
    question_tokens: int = 16
    answer_tokens: int = 0  # decoded greedily after the question
    popularity: float = 1.2  # documents are drawn with probability 1 / rank ** popularity
    chunk: int = 32

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {KINDS}")
        counts = ("requests", "documents", "document_tokens", "question_tokens", "chunk")
        config_checks.at_least(self, 1, *counts)
        config_checks.at_least(self, 0, "answer_tokens", "popularity")


@dataclasses.dataclass(kw_only=True)
class ReuseConfig:
    """All scenarios and the budgets they run under."""

    recall: Scenario = dataclasses.field(default_factory=Scenario)
    text: Scenario = dataclasses.field(
        default_factory=lambda: Scenario(
            name="text",
            kind="text",
            checkpoint="experiments/checkpoints/text_hybrid",
            train_config="configs/train_text.py",
            requests=120,
            document_tokens=448,
            question_tokens=32,
            answer_tokens=24,
            chunk=64,
        )
    )
    control: Scenario = dataclasses.field(
        default_factory=lambda: Scenario(
            name="control",
            checkpoint="experiments/checkpoints/recall_full",
            train_config="configs/train_demo_recall.py:control",
            document_tokens=96,
        )
    )
    scenarios: tuple[str, ...] = SCENARIOS
    modes: tuple[str, ...] = MODES
    # Store sizes as shares of the bytes that everything published would take in validated mode.
    # At the first, hit rates of hash_only and validated lie within 2 points; at the second not.
    capacities: tuple[float, ...] = (0.9, 0.4)
    policy: str = "end"  # where checkpoints are taken, see Policy.named
    train: bool = False  # train the checkpoints anew instead of loading the shipped ones
    seed: int = 0
    workdir: str = "runs/reuse"

    @property
    def chosen(self) -> dict[str, Scenario]:
        """The scenarios that are asked for, by field."""
        return {name: getattr(self, name) for name in self.scenarios}

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        config_checks.not_empty(self, "scenarios", "modes", "capacities")
        for name in self.scenarios:
            if name not in SCENARIOS:
                raise ValueError(f"unknown scenario {name!r}; choose from {', '.join(SCENARIOS)}")
        if unknown := sorted(set(self.modes) - set(MODES)):
            raise ValueError(f"unknown modes {unknown}; choose from {MODES}")
        config_checks.above(self, 0, "capacities")
        config_checks.at_least(self, 0, "seed")
        Policy.named(self.policy)
        config_checks.check_parts(self, *self.scenarios)
        config_checks.check_workdir(self)
