"""Pages that outlive their last holder: the host's books of what stays in the pools, and for how
long. A page of a prefix stays pinned until an admission needs it; the least recently used goes
first, and of one prefix the end before the beginning, since without a page those after it are of no
use.
"""

from collections.abc import Collection, Sequence


class Kept:
    """The pages of one component that are pinned, whether or not a row refers to them too."""

    def __init__(self) -> None:
        self._generations: dict[int, int] = {}  # by page, the first to go first

    def __contains__(self, page: int) -> bool:
        return page in self._generations

    def __len__(self) -> int:
        return len(self._generations)

    def pages(self) -> list[int]:
        """All of them, the first to go first."""
        return list(self._generations)

    def generation(self, page: int) -> int | None:
        """That of a page that is kept."""
        return self._generations.get(page)

    def use(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Leading pages of a prefix are kept from now on, or were used again."""
        for page, generation in zip(reversed(pages), reversed(generations), strict=True):
            self._generations.pop(page, None)
            self._generations[page] = generation

    def spoil(self, page: int) -> None:
        """A page that nobody can ask for any more goes before all others."""
        if page in self._generations:
            self._generations = {page: self._generations.pop(page)} | self._generations

    def forget(self, page: int) -> None:
        """A page that could not be pinned."""
        self._generations.pop(page, None)

    def drop(self, count: int, but: Collection[int]) -> list[tuple[int, int]]:
        """(page, generation) of the first `count` pages to go, none of `but`; forgotten here."""
        gone = [x for x in self._generations if x not in but][:count]
        return [(x, self._generations.pop(x)) for x in gone]
