"""How an engine works."""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from hetero_kv.arguments import check_callable, check_integer, check_number, check_type
from hetero_kv.pages.layout import Paging

SAVE, RECOMPUTE, NEVER = "save", "recompute", "never"


_LEAST = {
    **dict.fromkeys(("burst", "chunks_per_step", "max_stops", "max_waiting"), 1),
    "draft_tokens": 1,
    **dict.fromkeys(("tenant_slots", "audit_failures", "max_audits"), 1),
    **dict.fromkeys(("saved_bytes", "flight_timeout", "audit_share", "shadow_share"), 0),
    **dict.fromkeys(("noise_floor", "seed", "bundle_bytes"), 0),
    "max_bundles": 1,
}
_FLAGS = ("keep_logits", "keep_prompt_logits", "keep_pages", "validate", "debug_poison", "strict")
_INTEGERS = (
    *("burst", "chunks_per_step", "max_stops", "max_waiting", "tenant_slots", "saved_bytes"),
    *("audit_failures", "max_audits", "bundle_bytes", "max_bundles", "seed", "draft_tokens"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How an engine works; every default will do.

    burst: tokens that one step decodes at most, where no prompt is waiting to be run.
    chunks_per_step: prefill calls between two decode calls.
    max_waiting: requests that may wait; more are refused. tenant_slots: slots per tenant.
    preempt: what happens to requests of lower priority when one of higher finds no slot: "save"
        copies their state to the host, "recompute" runs them again, "never" lets them go on.
    saved_bytes: of saved state; a request for which there is no room is recomputed.
    flight_timeout: seconds to wait for another request that computes the same prefix.
    audit_share: of requests whose resumed prefix is computed again and compared.
    shadow_share: the same for reuse="shadow".
    audit_failures: failed audits after which reuse is off. noise_floor: an error up to it is none;
        0: the comparison is bitwise. max_audits: unfinished ones at a time.
    bundle_dir: where failed audits, and requests that ask for it, leave a bundle each (see
        bundle.py; None: nowhere): at most max_bundles, each of at most bundle_bytes of state.
        Every audit then copies its restored row to the host. weights_source: a checkpoint of the
        weights, which bundles name.
    drafter: guesses tokens that are then verified several at a time, see drafting.py (such as
        `PromptLookup()`); None: every token is decoded. draft_tokens: of a guess; more are refused,
        and at most a chunk less one can be rewound.
    keep_logits, keep_prompt_logits: in results.
    paging: pages that slots share, as `Paging.of(model.cache_spec, slots, capacity, …)`: each
        request holds those of its own tokens, and one copy of a prefix serves all. None: every slot
        has rows for `capacity` tokens of its own.
    keep_pages: pages of prefixes stay in the pools when their last request leaves, until they are
        needed: later requests share them without a copy. Only with `paging`.
    validate: every call verifies the state that it reads. False: for measurements.
    debug_poison: rows nobody owns are NaN. strict: a second compile of a bucket raises.
    clock, sleep: seconds.
    """

    burst: int = 8
    chunks_per_step: int = 1
    max_stops: int = 4
    max_waiting: int = 1024
    tenant_slots: int | None = None
    preempt: str = SAVE
    saved_bytes: int = 1 << 30
    flight_timeout: float = 30.0
    audit_share: float = 0.0
    shadow_share: float = 1.0
    audit_failures: int = 1
    noise_floor: float = 0.0
    max_audits: int = 4
    bundle_dir: str | None = None
    bundle_bytes: int = 1 << 28
    max_bundles: int = 16
    weights_source: str = ""
    drafter: Callable[[np.ndarray], Sequence[int] | np.ndarray] | None = None
    draft_tokens: int = 4
    keep_logits: bool = False
    keep_prompt_logits: bool = False
    paging: Paging | None = None
    keep_pages: bool = False
    validate: bool = True
    debug_poison: bool = False
    strict: bool = False
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self):
        if self.preempt not in (SAVE, RECOMPUTE, NEVER):
            raise ValueError(f"preempt must be save, recompute or never, got {self.preempt!r}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name == "tenant_slots":
                continue
            check = check_integer if name in _INTEGERS else check_number
            check(name, value, least)
        for name in _FLAGS:
            check_type(name, getattr(self, name), bool, "True or False")
        for name in ("clock", "sleep"):
            check_callable(name, getattr(self, name))
        if self.drafter is not None:
            check_callable("drafter", self.drafter)
        check_type("weights_source", self.weights_source, str)
        if not isinstance(self.bundle_dir, str | os.PathLike | None):
            raise ValueError(f"bundle_dir is a directory's path or None, got {self.bundle_dir!r}")
        if self.paging is not None and not isinstance(self.paging, Paging):
            raise ValueError(f"paging is a Paging or None, got {self.paging!r}")
        if self.keep_pages and self.paging is None:
            raise ValueError("keep_pages=True needs pages: give paging=Paging.of(…)")
        if self.bundle_dir is not None and pathlib.Path(self.bundle_dir).is_file():
            raise ValueError(f"bundle_dir={self.bundle_dir!r} is a file: name a directory")
