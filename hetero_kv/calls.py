"""What a call for all rows is asked, and what it tells."""

from typing import NamedTuple

import jax
import numpy as np

from hetero_kv.pages.validate import Expected
from hetero_kv.sampling import Choice


class Ask(NamedTuple):
    """What a decode call shall do for every row."""

    length: np.ndarray  # i32[R], where each row stands by the host's books
    token: np.ndarray  # i32[R], the token to feed first
    index: np.ndarray  # i32[R], the number of the token that comes out first
    budget: np.ndarray  # i32[R], tokens to make at most; 0: the row does not move
    check: np.ndarray  # bool[R], False: only its length is verified (approximate replays)
    forced: np.ndarray  # i32[R, burst], tokens that are known already (decoded once before)
    known: np.ndarray  # i32[R], how many of them
    stops: np.ndarray  # i32[R, max_stops], token ids that end a row; -1: none
    choice: Choice
    expected: Expected | None = None  # what the pages of the rows were given as


class Told(NamedTuple):
    """What a decode call did."""

    tokens: jax.Array  # i32[R, burst]
    ran: jax.Array  # i32[R], how many of them are valid
    finite: jax.Array  # bool[R], False: the logits after the last valid token are not numbers
    differs: jax.Array  # bool[R], a known token is not the one that was chosen now
    bits: jax.Array  # u32[R, components], the verdict: such a row did not move
    logits: jax.Array  # f32[R, burst, V], or f32[R, burst, 0]
