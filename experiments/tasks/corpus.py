"""The default text: the standard library's own sources, so that no download is ever needed.

About 10 MB that every interpreter carries. The text differs between Python versions, hence
`Corpus.digest`, which run records keep.
"""

import dataclasses
import functools
import hashlib
import pathlib
import sysconfig
from collections.abc import Iterable

import numpy as np

SPLITS = ("train", "val", "test")
_SKIPPED = frozenset({"site-packages", "dist-packages", "lib2to3", "encodings", "__pycache__"})


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Source files by split, in path order."""

    files: dict[str, tuple[tuple[str, bytes], ...]]  # split -> (relative path, content)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over every split's paths and contents."""
        sha = hashlib.sha256()
        for split in SPLITS:
            for path, content in self.files[split]:
                for part in (split.encode(), path.encode(), content):
                    # Lengths make the encoding injective: moving a byte between files changes it.
                    sha.update(len(part).to_bytes(8, "little"))
                    sha.update(part)
        return sha.hexdigest()

    @functools.cache  # noqa: B019  (one corpus per process)
    def text(self, split: str) -> np.ndarray:
        """All files of a split joined by an empty line, u8[bytes]."""
        if split not in SPLITS:
            raise ValueError(f"{split=} is not one of {SPLITS}")
        return np.frombuffer(b"\n\n".join(content for _, content in self.files[split]), np.uint8)


def split_of(path: str) -> str:
    """The split of a file: 90/5/5 by a hash of its path.

    Whole files go to one split; cutting by offset would leak near-duplicates of the same file.
    """
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little") % 100
    return "train" if bucket < 90 else "val" if bucket < 95 else "test"


def build(files: Iterable[tuple[str, bytes]]) -> Corpus:
    """Sorts (relative path, content) pairs into a corpus."""
    splits: dict[str, list[tuple[str, bytes]]] = {split: [] for split in SPLITS}
    for path, content in sorted(files):
        splits[split_of(path)].append((path, content))
    return Corpus({split: tuple(entries) for split, entries in splits.items()})


@functools.cache
def stdlib() -> Corpus:
    """The corpus of the running interpreter: its sources without tests and installed packages."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])

    def kept(path: pathlib.PurePath) -> bool:
        return not any(part in _SKIPPED or part.startswith("test") for part in path.parts)

    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return build((path.as_posix(), (root / path).read_bytes()) for path in paths if kept(path))
