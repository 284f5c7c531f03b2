"""Configuration of the fault matrix: which model, which faults, which checks."""

import dataclasses

from experiments import config_checks
from hetero_kv.faults.kinds import (
    ALL,
    CHECKS,
    EVIDENCE,
    FORM,
    JOINT,
    KINDS,
    LAST,
    OWNER,
    PAGE_BYTES,
    POSITIONS,
    RECYCLED,
    RESTORED,
    SLOT_BYTES,
    VALID,
)

AND = " + "  # between checks that are switched off together
RECALL, RANDOM = "recall", "random"
COVERING, EVERY = "covering", "all"
# Columns of the matrix, beside "no <check>". GUARD: only the check that each fault is for.
ALL_ON, GUARD, ALL_OFF = "all on", "guard alone", "all off"


# Behind these checks others find the same, one step later or in another way.
TOGETHER = (
    (POSITIONS, EVIDENCE),
    (JOINT, EVIDENCE),
    (EVIDENCE, RESTORED),
    (EVIDENCE, SLOT_BYTES),
    (VALID, PAGE_BYTES),
    (FORM, RECYCLED, OWNER),
)


@dataclasses.dataclass(kw_only=True)
class FaultsConfig:
    """One run: every fault under all checks, with each of `checks` off, with only the one that is
    there for it, and with none.

    paged: the engine's prefixes lie in pages, beside another request's; all checks on, or all off.
    model: "recall" is the shipped checkpoint and its task; "random" a tiny model, random weights.
    sample: "covering" takes every line of the table of faults at every moment once, components in
        turn; "all" every component.
    extents: of a prefix's history, "all" of its blocks are hit, or the "last".
    checks: several joined by " + " are off together; see TOGETHER.
    requests: prompts; faults take them in turn, and with all checks off each is tried on all.
    weight_noise: of other epochs and tenants, as a share of each weight's own spread.
    """

    paged: bool = False
    model: str = RECALL
    checkpoint: str = "experiments/checkpoints/recall_hybrid"
    sample: str = COVERING
    extents: tuple[str, ...] = (ALL,)
    kinds: tuple[str, ...] = KINDS
    checks: tuple[str, ...] = (*CHECKS, *(AND.join(x) for x in TOGETHER))
    requests: int = 2
    document_tokens: int = 64  # resumed; a multiple of the chunk, at least two
    question_tokens: int = 8  # after the resumed length
    weight_noise: float = 0.5
    chunk: int = 32
    seed: int = 0
    workdir: str = "runs/faults"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        for name, known in (
            ("model", (RECALL, RANDOM)),
            ("sample", (COVERING, EVERY)),
            ("extents", (ALL, LAST)),
            ("kinds", KINDS),
        ):
            value = getattr(self, name)
            chosen = (value,) if isinstance(value, str) else value
            if not chosen or set(chosen) - set(known):
                raise ValueError(f"{name}={value} must be of {known}")
        if not self.checks or {x for one in self.checks for x in one.split(AND)} - set(CHECKS):
            raise ValueError(f"checks={self.checks} must be of {CHECKS}, or some of them with +")
        config_checks.at_least(self, 1, "requests", "question_tokens", "chunk")
        config_checks.at_least(self, 0, "seed", "weight_noise")
        if self.document_tokens % self.chunk or self.document_tokens < 2 * self.chunk:
            raise ValueError(
                f"{self.document_tokens=} must be a multiple of {self.chunk=}, at least two: there "
                "must be a block and a checkpoint before the ones that are hit"
            )
        config_checks.check_workdir(self)
