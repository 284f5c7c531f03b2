"""What the store tells its caller about a publish or a deletion."""

import dataclasses

from hetero_kv.prefix.disk.results import LOST, Flushed


@dataclasses.dataclass(frozen=True)
class Published:
    """What a publish stored.

    length: tokens the cache stood at. blocks: history groups known for them now.
    new_blocks: of these, stored by this call. checkpoint: whether a checkpoint is stored at
    `length` now. reasons: why something was not stored, as stable codes.
    """

    length: int = 0
    blocks: int = 0
    new_blocks: int = 0
    checkpoint: bool = False
    reasons: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Removed:
    """What was dropped from all tiers together: groups, and bytes of their payloads.

    durable: whether the disk has acknowledged it (True without one). failure: why it has not.
    """

    groups: int = 0
    nbytes: int = 0
    durable: bool = True
    failure: str = ""

    def __add__(self, other: "Removed") -> "Removed":
        """Both together."""
        return Removed(
            self.groups + other.groups,
            self.nbytes + other.nbytes,
            self.durable and other.durable,
            self.failure or other.failure,
        )

    def on_disk(self, flushed: Flushed) -> "Removed":
        """With what a flush of the disk has achieved. What it lost is gone as well."""
        failure = "" if flushed.failure == LOST else flushed.failure
        return dataclasses.replace(self, durable=not failure, failure=failure)
