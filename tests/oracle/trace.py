"""Internals of a reference forward pass, kept so that tests can check every leaf of a cache."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class LayerTrace:
    """One layer. A field stays None where the layer has no such thing.

    unsure: the first token from which on what is stored may rightly differ, see `packing.stored`.

    `rows`, `keys` and `values` are rotated and normed as attention reads them; the raw rows are
    the compressors' projections without bias, norm or rotation.
    """

    rows: np.ndarray | None = None  # [T, c]; the window's rows are the last W of these
    keys: np.ndarray | None = None  # [T, G, c], full attention
    values: np.ndarray | None = None  # [T, G, c], full attention
    entries: np.ndarray | None = None  # [T // m, c]
    raw_kv: np.ndarray | None = None  # [T, c or 2c]
    raw_gate: np.ndarray | None = None  # [T, c or 2c]
    index_keys: np.ndarray | None = None  # [T // m, c_I]
    index_raw_kv: np.ndarray | None = None  # [T, c_I or 2 c_I]
    index_raw_gate: np.ndarray | None = None  # [T, c_I or 2 c_I]
    index_scores: np.ndarray | None = None  # [T, T // m], also of entries not visible
    selected: np.ndarray | None = None  # bool[T, T // m], entries that the query attends to
    gap: np.ndarray | None = None  # [T], k-th score less the next one; inf where none is left out
    experts: np.ndarray | None = None  # i64[T, experts_per_token]
    router_gap: np.ndarray | None = None  # [T], as `gap`, of the expert choice
    attention_out: np.ndarray | None = None  # [T, d]
    mlp_out: np.ndarray | None = None  # [T, d]
    unsure: float = np.inf


@dataclasses.dataclass
class Trace:
    """Internals of all layers, and the last hidden state [T, d] before the output norm."""

    layers: list[LayerTrace] = dataclasses.field(default_factory=list)
    hidden: np.ndarray | None = None

    def selections(self) -> dict[int, np.ndarray]:
        """Selected sets by layer, in the form that `forward(forced_selection=…)` takes."""
        return {i: t.selected for i, t in enumerate(self.layers) if t.index_scores is not None}

    def smallest_gap(self) -> np.ndarray:
        """Per position, the smallest index gap of any layer; float64[T]."""
        gaps = [t.gap for t in self.layers if t.gap is not None]
        return np.min(gaps, axis=0) if gaps else np.full(len(self.hidden), np.inf)
