"""Cache anatomy: what each layer of a model holds at a length, from contracts and real caches.

Everything is read off a CacheSpec: which tokens each live row stands for (`rows_of`), and how many
bytes that is. `differences` compares it with the evidence in a cache that really ran.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import matplotlib.axes
import matplotlib.figure
import matplotlib.patches
import numpy as np

from experiments.exhibit import COLOURS, plain
from hetero_kv.contract import CacheSpec, Evidence, History, LayerSpec, Leaf, Point, Window
from hetero_kv.state import Cache
from models.config import DecoderConfig

ENTRY, TOKEN, WINDOW, TAIL, STATE = "entries", "a row a token", "window", "tail", "state"
COLOUR = dict(zip((ENTRY, TOKEN, WINDOW, TAIL, STATE), COLOURS, strict=False))


@dataclasses.dataclass(frozen=True)
class Held:
    """What one leaf of one layer holds.

    form: one of COLOUR. spans: first and last token of each live row, by row; empty for a state of
    a matrix, which stands for all tokens. rows: that there is room for. nbytes: of the live ones.
    """

    layer: int
    kind: str
    name: str
    component: str
    form: str
    spans: tuple[tuple[int, int], ...]
    rows: int
    nbytes: int


def example() -> DecoderConfig:
    """A layer of each sort, small enough to draw: a window of 8, ratios of 4 and 16."""
    return DecoderConfig(
        vocab_size=64,
        d_model=32,
        layer_types=("swa", "csa", "hca", "full", "gated_delta"),
        mlp_types=("dense",) * 5,
        attention={"gated_delta": {"key_heads": 2, "value_heads": 2, "key_dim": 8, "value_dim": 8}},
        n_heads=4,
        head_dim=16,
        rope_dim=8,
        n_kv_heads=2,
        d_ff=32,
        window=8,
        csa_ratio=4,
        hca_ratio=16,
        index_heads=2,
        index_dim=8,
        index_topk=4,
        chunk=16,
        block=16,
        init_scale=0.3,
    )


def rows_of(spec: CacheSpec, length: int) -> list[Held]:
    """Every leaf but evidence, layer by layer, bottom first, at a length in tokens.

    Raises:
        ValueError: there are no tokens.
    """
    if length < 1:
        raise ValueError(f"length={length} is a number of tokens >= 1")
    return [
        _held(number, layer, name, leaf, length)
        for number, layer in enumerate(spec.layers())
        for name, leaf in layer.leaves
        if isinstance(leaf.contract, History | Window | Point)
    ]


def _held(number: int, layer: LayerSpec, name: str, leaf: Leaf, length: int) -> Held:
    contract = leaf.contract
    live = np.flatnonzero(leaf.live_rows(length, length))
    if isinstance(contract, History):
        form = TOKEN if contract.stride == contract.span == 1 else ENTRY
        first = [int(i) * contract.stride for i in live]
        spans = tuple((x, x + contract.span - 1) for x in first)
    elif leaf.is_ring:
        form = WINDOW if isinstance(contract, Window) else TAIL
        held = leaf.ring_positions(length)
        spans = tuple((int(p), int(p)) for p in sorted(held[live]))
    else:
        form, spans = STATE, ()
    rows = leaf.row_count(length)
    nbytes = len(live) * leaf.row_bytes if rows else leaf.row_bytes
    return Held(number, layer.kind, name, leaf.component, form, spans, rows or 1, nbytes)


def differences(spec: CacheSpec, cache: Cache, row: int = 0) -> list[str]:
    """Where the evidence in a cache is not what the contracts say at its length; none is right.

    Positions of ring rows and counters of entries were written by the model as it ran.
    """
    length, found = int(cache.length[row]), []
    for slot in spec.slots():
        evidence = slot.leaf.contract
        if not isinstance(evidence, Evidence):
            continue
        leaf = dict(spec.segments[slot.segment].layers[slot.layer].leaves)[evidence.of]
        written = np.asarray(cache.leaf(slot))[:, row]
        if evidence.kind == "count":
            wanted = np.full(written.shape, int(leaf.contract.count(length)))
        else:
            live = leaf.live_rows(length)
            wanted = np.where(live, leaf.ring_positions(length), -1)
            written = np.where(live, written, -1)
        if not np.array_equal(written, np.broadcast_to(wanted, written.shape)):
            found.append(f"{slot.path} ({evidence.of}): {written.tolist()} and not {wanted}")
    return found


def bytes_by_form(held: Sequence[Held]) -> dict[str, int]:
    """Live bytes by form."""
    found: dict[str, int] = {}
    for x in held:
        found[x.form] = found.get(x.form, 0) + x.nbytes
    return found


def draw(held: Sequence[Held | Mapping], length: int) -> matplotlib.figure.Figure:
    """A lane a leaf over token positions: each live row as a bar over the tokens it stands for.

    held: `rows_of`, or the same as JSON.
    """
    made = [x if isinstance(x, Held) else Held(**x) for x in held]
    fig = matplotlib.figure.Figure(figsize=(9, 0.32 * len(made) + 1.1), layout="constrained")
    axis = fig.subplots()
    plain(axis)
    for y, x in enumerate(made):
        colour = COLOUR[x.form]
        if x.form == STATE:
            axis.barh(y, length, left=0, height=0.7, color=colour, alpha=0.25)
            axis.barh(y, 1, left=length - 1, height=0.7, color=colour)
            axis.text(length / 2, y, "one matrix a head: all tokens, at exactly this length",
                      ha="center", va="center", fontsize=7)  # fmt: skip
            continue
        bars = [(first, last - first + 1) for first, last in x.spans]
        axis.broken_barh(bars, (y - 0.35, 0.7), facecolor=colour, edgecolor="white", linewidth=0.5)
    labels = [f"{x.layer} {x.kind}: {x.component}" for x in made]
    axis.set_yticks(range(len(made)), labels, fontsize=7)
    axis.set_ylim(len(made) - 0.4, -0.6)
    axis.set_xlim(0, length + 0.5)
    axis.axvline(length, color="black", linewidth=1)
    for y in range(1, len(made)):
        if made[y].layer != made[y - 1].layer:
            axis.axhline(y - 0.5, color="grey", linewidth=0.4)
    axis.set_xlabel(f"token position; the sequence has {length} tokens")
    used = dict.fromkeys(x.form for x in made)
    axis.legend(
        handles=[matplotlib.patches.Patch(color=COLOUR[x], label=x) for x in used],
        fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(used),
    )  # fmt: skip
    return fig


def draw_ring(axis: matplotlib.axes.Axes, leaf: Leaf, lengths: Sequence[int]) -> None:
    """Which position each row of a ring holds, by length; dead rows are left white."""
    at = np.asarray(lengths)
    held = np.where(leaf.live_rows(at), leaf.ring_positions(at), -1).astype(float).T
    held[held < 0] = np.nan
    axis.imshow(held, aspect="auto", cmap="viridis", interpolation="nearest",
                extent=(at[0] - 0.5, at[-1] + 0.5, len(held) - 0.5, -0.5))  # fmt: skip
    for (row, column), position in np.ndenumerate(held):
        if not np.isnan(position) and len(at) <= 32:
            axis.text(at[column], row, f"{position:.0f}", ha="center", va="center", fontsize=5,
                      color="white")  # fmt: skip
    axis.set_xlabel("length, tokens")
    axis.set_ylabel("row of the ring")
    axis.set_title(leaf.component, fontsize=9)


def draw_growth(spec: CacheSpec, lengths: Sequence[int]) -> matplotlib.figure.Figure:
    """Live bytes by form over lengths: what grows with the sequence, and what does not."""
    by_length = [bytes_by_form(rows_of(spec, n)) for n in lengths]
    fig = matplotlib.figure.Figure(figsize=(6, 3), layout="constrained")
    axis = fig.subplots()
    plain(axis)
    for form, colour in COLOUR.items():
        values = [x.get(form, 0) / 1024 for x in by_length]
        if any(values):
            axis.plot(lengths, values, marker="o", markersize=3, color=colour, label=form)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="KiB that matter")
    axis.legend(fontsize=7)
    return fig
