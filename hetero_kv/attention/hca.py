"""HCA: a window, and every visible entry of a heavily compressed branch (V4 report, 2.3)."""

from hetero_kv.attention.compressed import Compressed
from hetero_kv.attention.compressor import Compressor
from hetero_kv.attention.entries import EntryPool
from hetero_kv.attention.latent_heads import LatentHeads
from hetero_kv.attention.window import WindowBranch


def hca(heads: LatentHeads, window: WindowBranch | None, *, ratio: int) -> Compressed:
    """An HCA layer: disjoint groups of `ratio` tokens. Leaves: window, tail, entries."""
    compressor = Compressor(
        heads.d_model, heads.dim, ratio, False, heads.rope, heads.eps, heads.cache_dtype
    )
    entries = EntryPool("entries", "hca entries", ratio, heads.dim, heads.cache_dtype)
    return Compressed("hca", heads, window, compressor, entries)
