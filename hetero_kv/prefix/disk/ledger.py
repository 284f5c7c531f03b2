"""What the tier's bytes are spent on (DESIGN rule 7)."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes of the directory; live + dead + overhead + free == capacity.

    live: records that can be read, headers and padding included.
    dead: killed or damaged records, and files that are ignored; given back by compaction.
    overhead: segment headers, and what the index may take.
    free: nobody's.
    queued: of records that wait in memory to be written; not part of the sum.
    """

    capacity: int
    live: int
    dead: int
    overhead: int
    free: int
    queued: int

    @property
    def exact(self) -> bool:
        """Whether the sum holds."""
        return self.live + self.dead + self.overhead + self.free == self.capacity
