"""What the layout of prompts forfeits: text that came before, but not at the start of a prompt.

A prefix cache reuses a text only where everything before it is the same as well. Where a date or a
user's name stands before a long instruction, the instruction is computed again each time. Counted
here is what of a prompt's tokens was seen before anywhere, in runs of at least one block.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: has an inverse modulo 2^64


@dataclasses.dataclass(frozen=True)
class Layout:
    """Tokens: of all prompts, of the longest earlier prefixes, and seen before anywhere.

    Both in whole blocks.
    """

    tokens: int
    prefix: int
    anywhere: int

    @property
    def forfeited(self) -> float:
        """Share of tokens that stood in an earlier prompt, but behind another text."""
        return (self.anywhere - self.prefix) / max(self.tokens, 1)


def mixed(values: np.ndarray) -> np.ndarray:
    """Spreads u64 values over all bits (the finaliser of SplitMix64)."""
    x = values.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def windows(tokens: np.ndarray, block: int) -> np.ndarray:
    """A hash u64[n - block + 1] of every run of `block` tokens; equal runs have equal hashes."""
    n = len(tokens)
    if n < block:
        return np.zeros(0, np.uint64)
    with np.errstate(over="ignore"):
        powers = np.concatenate([np.ones(1, np.uint64), np.full(n, _BASE)]).cumprod(dtype=np.uint64)
        inverse = np.uint64(pow(int(_BASE), -1, 1 << 64))
        back = np.concatenate([np.ones(1, np.uint64), np.full(n, inverse)]).cumprod(dtype=np.uint64)
        terms = mixed(np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * powers[:n]
        sums = np.concatenate([np.zeros(1, np.uint64), terms.cumsum(dtype=np.uint64)])
        return mixed((sums[block:] - sums[:-block]) * back[: n - block + 1])


def measure(prompts: Iterable[Sequence[int]], block: int) -> Layout:
    """Goes through the prompts in order of arrival.

    Raises:
        ValueError: the block is not a number of tokens >= 1.
    """
    if block < 1:
        raise ValueError(f"{block=} is a number of tokens >= 1")
    # Hashes of whole blocks from every prompt's start, and chained: of its prefixes.
    pieces: set[int] = set()
    prefixes: set[int] = set()
    tokens = prefix = anywhere = 0
    for prompt in prompts:
        hashes = windows(np.asarray(prompt), block)
        aligned = hashes[::block]
        chain = _chained(aligned)
        matched = next((i for i, x in enumerate(chain) if x not in prefixes), len(chain))
        place = covered = matched * block
        listed = hashes.tolist()
        while place < len(listed):
            if listed[place] in pieces:
                covered += block
                place += block
            else:
                place += 1
        tokens += len(prompt)
        prefix += matched * block
        anywhere += covered
        pieces.update(aligned.tolist())
        prefixes.update(chain)
    return Layout(tokens, prefix, anywhere)


def _chained(aligned: np.ndarray) -> list[int]:
    found, last = [], 0
    for value in aligned.tolist():
        last = int(mixed(np.asarray([last ^ value], np.uint64))[0])
        found.append(last)
    return found
