"""How a schedule of layers is cut into segments: a pattern of layers and its repeats.

Layers of a segment that repeats are stacked and scanned, so a deep model compiles as fast as the
sum of its patterns.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence

MAX_PATTERN = 8


@dataclasses.dataclass(frozen=True)
class Run:
    """Layers `start .. start + len(pattern) * repeats - 1` of a schedule."""

    start: int
    pattern: tuple[Hashable, ...]
    repeats: int

    def layer(self, repeat: int, position: int) -> int:
        """The layer number of one pattern position in one repeat."""
        return self.start + repeat * len(self.pattern) + position


def cut(kinds: Sequence[Hashable], scan: bool) -> tuple[Run, ...]:
    """The segmentation with the fewest distinct layer bodies (then the fewest segments).

    With `scan` off every layer is a segment of its own.
    """
    kinds = tuple(kinds)
    if not scan:
        return tuple(Run(i, (kind,), 1) for i, kind in enumerate(kinds))

    @functools.cache
    def best(start: int) -> tuple[int, int, tuple[Run, ...]]:
        if start == len(kinds):
            return 0, 0, ()
        options = []
        for size in range(1, min(MAX_PATTERN, len(kinds) - start) + 1):
            pattern = kinds[start : start + size]
            repeats = 1
            while kinds[start + repeats * size : start + (repeats + 1) * size] == pattern:
                repeats += 1
            for times in dict.fromkeys((1, repeats, *range(2, repeats))):
                bodies, segments, rest = best(start + times * size)
                run = Run(start, pattern, times)
                options.append((bodies + size, segments + 1, (run, *rest)))
        return min(options, key=lambda option: option[:2])

    return best(0)[2]
