"""Drafts inside the engine: what comes next is guessed, and verified several tokens at a time.

What a request guesses depends on its own tokens alone, and so do the calls that it is cut into
(see verifying.py) and its bits: they are those of a run whose guesses were all right, verified in
the same pieces. From those of a run without drafts they differ by rounding, since a call for
several tokens adds up in another order than a decode step.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from hetero_kv.metrics import Counters
from hetero_kv.prefix.plan import Reason
from hetero_kv.scheduler import Entry

# i32[n], all tokens of a request so far → those that come next, perhaps. Pure: the same tokens
# must give the same guess.
Drafter = Callable[[np.ndarray], "Sequence[int] | np.ndarray"]


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """A drafter that guesses what followed the last tokens where they came up before.

    Of the last `longest` tokens, or fewer down to `shortest`, the latest earlier occurrence counts.
    It guesses `tokens` of what followed there, or fewer if there is no more.
    """

    tokens: int = 4
    longest: int = 3
    shortest: int = 1

    def __post_init__(self):
        if not 1 <= self.shortest <= self.longest or self.tokens < 1:
            raise ValueError(f"need 1 <= shortest <= longest, and a token at least: {self}")

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """i32[n] → i32[<= self.tokens]; empty: these tokens are new."""
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            places = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            (found,) = np.nonzero((places == tokens[-size:]).all(-1))
            if len(found):
                start = found[-1] + size
                return tokens[start : start + self.tokens]
        return tokens[:0]


class Drafting:
    """The guesses of one engine.

    Args:
        most: tokens of a guess; more are refused, as are tokens that there are not, and errors: the
            request then goes on by a decode step, and says so once.
    """

    def __init__(self, drafter: Drafter, most: int, vocab: int, counters: Counters):
        self._drafter, self._most, self._vocab = drafter, most, vocab
        self._counters = counters

    def guess(self, entry: Entry) -> np.ndarray | None:
        """i32[d]: what an entry tries after its last token; None: nothing, it decodes.

        What it has verified before a preemption it verifies again in the same pieces, of which it
        knows the tokens: d may be 0 then.
        """
        at = entry.cursor
        if at < len(entry.emitted):
            fed = entry.pieces.get(at)
            return None if fed is None else np.array(entry.emitted[at : at + fed - 1], np.int32)
        room = int(entry.request.max_new_tokens) - 1 - at
        if room < 1:
            return None
        so_far = np.concatenate([entry.prompt, np.array(entry.emitted, np.int32)])
        try:
            found = np.asarray(self._drafter(so_far))
            why = self._problem(found)
        except Exception as error:  # whatever a drafter does, the request is served
            why = repr(error)
        if why:
            self._counters.add("drafts_refused_total")
            if all(x.code != "draft_refused" for x in entry.notes):
                entry.notes.append(Reason("", "draft_refused", 0, 0, why))
            return None
        return found[:room].astype(np.int32) if len(found) else None

    def _problem(self, found: np.ndarray) -> str:
        if found.ndim != 1 or (len(found) and not np.issubdtype(found.dtype, np.integer)):
            return f"a draft is i32[d], got {found.dtype}{list(found.shape)}"
        if len(found) > self._most:
            return (
                f"drafted {len(found)} tokens, at most {self._most} can be rewound: draft fewer, "
                "or raise Options.draft_tokens"
            )
        if len(found) and (found.min() < 0 or found.max() >= self._vocab):
            return f"drafted tokens must be in 0..{self._vocab - 1}, got {found.tolist()}"
        return ""
