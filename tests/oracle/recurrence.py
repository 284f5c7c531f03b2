"""Linear recurrences of one head, token by token, as their papers write them (numpy)."""

import numpy as np


def plain(q, k, v, decay, state):
    """`S <- diag(exp(a)) S + k v^T`, `o = S^T q`, for tokens [T, ...] and state [K, V]."""
    out = []
    for t in range(len(q)):
        state = np.exp(decay[t])[:, None] * state + np.outer(k[t], v[t])
        out.append(state.T @ q[t])
    return np.array(out), state


def delta(q, k, v, decay, beta, state):
    """As `plain`, with `S <- (I - b k k^T) diag(exp(a)) S + b k v^T` (Kimi Linear, eq. 1)."""
    out, eye = [], np.eye(q.shape[-1])
    for t in range(len(q)):
        forget = eye - beta[t] * np.outer(k[t], k[t])
        state = forget @ (np.exp(decay[t])[:, None] * state) + beta[t] * np.outer(k[t], v[t])
        out.append(state.T @ q[t])
    return np.array(out), state
