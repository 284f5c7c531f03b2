"""HCA: a window, and every visible entry of a heavily compressed branch (V4 report, 2.3)."""

from hetero_kv.attention.compressed import Compressed
from hetero_kv.attention.compressor import Compressor
from hetero_kv.attention.entries import EntryPool
from hetero_kv.attention.fields import Fields
from hetero_kv.attention.latent_heads import LatentHeads
from hetero_kv.attention.window import WindowBranch


def build(fields: Fields) -> Compressed:
    """From a layer type's fields: disjoint groups of `hca_ratio` tokens. Its own: rope.

    Leaves: window, tail, entries.
    """
    rope = fields.rope_of(fields.compress_rope_theta, fields.yarn)
    heads, ratio = LatentHeads.of(fields, rope), fields.hca_ratio
    compressor = Compressor(
        heads.d_model, heads.dim, ratio, False, heads.rope, heads.eps, heads.cache_dtype
    )
    entries = EntryPool(
        "entries",
        f"{fields.kind} entries",
        ratio,
        heads.dim,
        heads.cache_dtype,
        packing=fields.packing("entries", heads.dim, rope.dim),
    )
    return Compressed(fields.kind, heads, WindowBranch.of(fields, rope.dim), compressor, entries)
