"""Measures of recall: how crowded entries are, what an indexer finds of what it should."""

import numpy as np

from experiments import tasks


def facts_per_entry(task: tasks.Recall, ratio: int, overlap: bool = False) -> float:
    """Facts that the entry of a fact's value holds, the fact itself included; a mean over facts.

    For facts side by side. overlap: an entry pools the group before its own as well.
    """
    values = task.offset + np.arange(task.pairs) * task.stride + 1
    groups = values // ratio
    held = groups[None] == groups[:, None]
    if overlap:
        held |= groups[None] == groups[:, None] - 1
    return float(held.sum(1).mean())


def fact_places(tokens: np.ndarray, start: int) -> np.ndarray:
    """Where the key that is asked at each position stands, i32[B, T]; -1 before `start`.

    tokens: i32[B, T], queries from `start` on. Keys stand nowhere but in their facts.
    """
    same = tokens[:, :, None] == tokens[:, None, :start]
    places = np.where(same.any(2), same.argmax(2), -1)
    places[:, :start] = -1
    return places


def top(scores: np.ndarray, visible: np.ndarray, k: int) -> np.ndarray:
    """The k highest visible scores of f32[..., N], the lower index first: bool[..., N]."""
    order = np.argsort(np.where(visible, -scores, np.inf), axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1, kind="stable")
    return (rank < k) & visible


def recall_at(picked: np.ndarray, wanted: np.ndarray) -> float:
    """Share of bool[..., N] `wanted` that is `picked`, a mean over those that want something."""
    count = wanted.sum(-1)
    share = (picked & wanted).sum(-1)[count > 0] / count[count > 0]
    return float(share.mean())


def mass(picked: np.ndarray, shares: np.ndarray) -> float:
    """Attention f32[..., N] that falls on what is picked, a mean over those that attend at all."""
    total = shares.sum(-1)
    return float(((shares * picked).sum(-1)[total > 0] / total[total > 0]).mean())


def found(picked: np.ndarray, places: np.ndarray, ratio: int, overlap: bool) -> float:
    """Share of queries whose fact is in a picked entry.

    picked: bool[Q, N]; places: i32[Q] of keys, the value stands behind. An entry holds the fact's
    value if it is of its group, or with overlap of the next one.
    """
    group = (places + 1) // ratio
    count = picked.shape[-1]
    query = np.arange(len(places))
    hit = picked[query, np.minimum(group, count - 1)]
    if overlap:
        hit = hit | (picked[query, np.minimum(group + 1, count - 1)] & (group + 1 < count))
    return float(hit.mean())
