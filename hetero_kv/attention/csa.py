"""CSA: a window, and the top k of compressed entries that an indexer picks (V4 report, 2.3)."""

import dataclasses

from hetero_kv.attention.compressed import Compressed
from hetero_kv.attention.compressor import Compressor
from hetero_kv.attention.entries import EntryPool
from hetero_kv.attention.indexer import Indexer
from hetero_kv.attention.latent_heads import LatentHeads
from hetero_kv.attention.window import WindowBranch


def csa(
    heads: LatentHeads,
    window: WindowBranch | None,
    *,
    ratio: int,
    overlap: bool,
    index_heads: int,
    index_dim: int,
    topk: int,
) -> Compressed:
    """A CSA layer. `topk` < 0 attends every visible entry and has no indexer at all.

    Leaves: window, tail (open rows and overlap), entries; index_tail and index_keys.
    """
    compressor = Compressor(
        heads.d_model, heads.dim, ratio, overlap, heads.rope, heads.eps, heads.cache_dtype
    )
    entries = EntryPool("entries", "csa entries", ratio, heads.dim, heads.cache_dtype)
    if topk < 0:
        return Compressed("csa", heads, window, compressor, entries)
    if index_dim < heads.rope.dim:
        raise ValueError(
            f"index_dim={index_dim} must be at least rope_dim={heads.rope.dim}: index keys are "
            "rotated on their last channels"
        )
    if topk < 1 or index_heads < 1:
        raise ValueError(f"index_topk={topk} and index_heads={index_heads} must be >= 1")
    keys = dataclasses.replace(compressor, width=index_dim)
    indexer = Indexer(heads.d_model, heads.d_query, index_heads, index_dim, topk, keys)
    pool = EntryPool("index_keys", "csa index keys", ratio, index_dim, heads.cache_dtype)
    return Compressed("csa", heads, window, compressor, entries, indexer, pool)
