"""Native sparse attention of one layer, from the equations: loops over tokens, float64."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.oracle.maths import Array
from tests.oracle.rope import plain_frequencies, rotate


def softmax(logits: Array) -> Array:
    """Over all entries; empty stays empty."""
    weight = np.exp(logits - logits.max(initial=-np.inf)) if logits.size else logits
    return weight / weight.sum() if logits.size else weight


def gelu(x: Array) -> Array:
    """The tanh form."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(
    x: Array,
    weights: Mapping[str, Any],
    *,
    heads: int,
    groups: int,
    dim: int,
    rope_dim: int,
    theta: float,
    span: int,
    stride: int,
    select: int,
    top: int,
    window: int,
) -> tuple[Array, list[list[set[int]]]]:
    """x [T, d] to [T, d], and the blocks that each token and group selects."""
    length, shared = len(x), heads // groups
    omega = plain_frequencies(rope_dim, theta)

    def turned(rows: Array, positions: Array) -> Array:
        flat = rows.reshape(len(rows), -1, dim)
        return np.stack([rotate(flat[:, h], positions, omega) for h in range(flat.shape[1])], 1)

    at = np.arange(length)
    q = turned(x @ weights["q"], at)
    kv = {name: np.split(x @ weights[f"kv_{name}"], 2, axis=1) for name in NAMES}
    keys = {name: turned(kv[name][0], at) for name in ("select", "window")}
    values = {name: kv[name][1].reshape(length, groups, dim) for name in NAMES}

    def compressed(rows: Array, part: Mapping[str, Array], g: int, i: int) -> Array:
        block = rows.reshape(length, groups, dim)[i * stride : i * stride + span, g]
        return gelu((block + part["places"]).reshape(-1) @ part["up"]) @ part["down"]

    many = max(0, (length - span) // stride + 1)
    small_k = np.zeros((many, groups, dim))
    small_v = np.zeros((many, groups, dim))
    for i in range(many):
        for g in range(groups):
            small_k[i, g] = compressed(kv["compress"][0], weights["compress_k"], g, i)
            small_v[i, g] = compressed(kv["compress"][1], weights["compress_v"], g, i)
    if many:
        small_k = turned(small_k.reshape(many, -1), np.arange(many) * stride)

    out, chosen = np.zeros((length, heads, dim)), []
    gates = 1 / (1 + np.exp(-(x @ weights["gate"]))).reshape(length, len(NAMES), heads)
    for t in range(length):
        chosen.append([])
        for g in range(groups):
            seen = [i for i in range(many) if i * stride + span - 1 <= t]
            mine = range(g * shared, (g + 1) * shared)
            shares = {h: softmax(q[t, h] @ small_k[seen, g].T / math.sqrt(dim)) for h in mine}
            last = t // select
            worth = np.zeros(last + 1)
            for j in range(last + 1):
                for i in seen:  # strides of block i that lie in block j
                    inside = sum(
                        j * select <= i * stride + s * stride < (j + 1) * select
                        for s in range(span // stride)
                    )
                    worth[j] += inside * sum(shares[h][seen.index(i)] for h in mine)
            worth[[0, last, max(0, last - 1)]] = np.inf
            best = set(np.argsort(-worth, kind="stable")[:top].tolist())
            chosen[t].append(best)
            whole = [s for s in range(t + 1) if s // select in best]
            near = list(range(max(0, t - window + 1), t + 1))
            for h in mine:
                parts = [shares[h] @ small_v[seen, g]]
                for name, index in (("select", whole), ("window", near)):
                    p = softmax(keys[name][index, g] @ q[t, h] / math.sqrt(dim))
                    parts.append(p @ values[name][index, g])
                out[t, h] = sum(gates[t, n, h] * part for n, part in enumerate(parts))
    return out.reshape(length, -1) @ weights["o"], chosen


NAMES = ("compress", "select", "window")
