"""CSA: a window, and the top k of compressed entries that an indexer picks (V4 report, 2.3)."""

import dataclasses

from hetero_kv.attention.compressed import Compressed
from hetero_kv.attention.compressor import Compressor
from hetero_kv.attention.entries import EntryPool
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.indexer import WITH_INDEXER, Indexer
from hetero_kv.attention.latent_heads import LatentHeads
from hetero_kv.attention.window import WindowBranch


def build(fields: Fields) -> Compressed:
    """From a layer type's fields; its own: rope.

    Leaves: window, tail (open rows and overlap), entries; index_tail and index_keys. Without
    `indexer`, or with `index_topk` < 0, every visible entry is attended and there is no indexer.
    """
    rope = fields.rope_of(fields.compress_rope_theta, fields.yarn)
    heads, window = LatentHeads.of(fields, rope), WindowBranch.of(fields, rope.dim)
    kind, ratio, topk = fields.kind, fields.csa_ratio, fields.index_topk
    compressor = Compressor(
        heads.d_model, heads.dim, ratio, fields.csa_overlap, rope, heads.eps, heads.cache_dtype
    )
    entries = EntryPool(
        "entries",
        f"{kind} entries",
        ratio,
        heads.dim,
        heads.cache_dtype,
        packing=fields.packing("entries", heads.dim, rope.dim),
    )
    if not (fields.indexer and topk >= 0):
        fields.idle(WITH_INDEXER, "index_heads", "index_dim")
        return Compressed(kind, heads, window, compressor, entries)
    index_heads, index_dim = fields.index_heads, fields.index_dim
    if index_dim < rope.dim:
        raise ValueError(
            f"index_dim={index_dim} must be at least rope_dim={rope.dim}: index keys are "
            "rotated on their last channels"
        )
    keys = dataclasses.replace(compressor, width=index_dim)
    indexer = Indexer(heads.d_model, heads.d_query, index_heads, index_dim, topk, keys)
    pool = EntryPool(
        "index_keys",
        f"{kind} index keys",
        ratio,
        index_dim,
        heads.cache_dtype,
        packing=fields.packing("index_keys", index_dim),
    )
    return Compressed(kind, heads, window, compressor, entries, indexer, pool)
