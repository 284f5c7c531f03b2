"""One call of each op with random arrays: what it reads, what it computes, how to run it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.kernel_config import Geometry
from hetero_kv.attention.pool import Paged
from hetero_kv.attention.rope import Rope
from hetero_kv.kernels.checks import TILE
from hetero_kv.kernels.chunk_attention import api as chunk
from hetero_kv.kernels.chunk_attention import operands as chunk_operands
from hetero_kv.kernels.compressor import api as compressor
from hetero_kv.kernels.compressor.reference import Pooling
from hetero_kv.kernels.decode_attention import operands as decode_operands
from hetero_kv.kernels.decode_attention.api import decode_attention
from hetero_kv.kernels.indexer import operands as index_operands
from hetero_kv.kernels.indexer.api import select
from hetero_kv.kernels.page_copy import api as page_copy
from hetero_kv.packing import Packed, Packing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one size.

    run(layer, arrays, implementation, tiles) -> result: traceable; other layers are other bytes.
    keep(arrays, result) -> arrays: those of the next call, where the first is updated in place.
    bytes, flops: what one call must move and compute. same(got, want) -> fraction that agrees.
    operands: what a kernel's `key` and `choose` take, for tuning. k: of the indexer.
    """

    op: str
    name: str
    arrays: Any
    run: Callable
    bytes: int
    flops: int
    same: Callable[[Any, Any], float]
    keep: Callable[[Any, Any], Any] | None = None
    operands: Any = None
    k: int | None = None


def close(got: Any, want: Any) -> float:
    """Fraction of values within 2 % of the largest."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    return float(np.mean(np.abs(got - want) <= 0.02 * max(1e-6, np.nanmax(np.abs(want)))))


def same_set(got: Any, want: Any) -> float:
    """Fraction of picks in common: scores that are almost equal may be cut either way."""
    pairs = zip(np.asarray(got), np.asarray(want), strict=True)
    return min(len(set(g.tolist()) & set(w.tolist())) / len(set(w.tolist())) for g, w in pairs)


def equal(got: Any, want: Any) -> float:
    """1 where all bits are equal."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return float(all(np.array_equal(np.asarray(g), np.asarray(w)) for g, w in pairs))


class Cases:
    """Cases of one geometry, batch and context. first: whether it is the first of the contexts;
    ops whose work does not grow with the context are measured there only."""

    def __init__(self, geometry: Geometry, batch: int, tokens: int, seed: int, first: bool = True):
        self.geometry, self.batch, self.tokens, self.first = geometry, batch, tokens, first
        self._keys = iter(jax.random.split(jax.random.key(seed), 64))
        self._dtype = jnp.dtype(geometry.dtype)

    def of(self, op: str) -> Iterator[Case]:
        """All cases of an op."""
        yield from getattr(self, f"_{op}")()

    def _random(self, *shape: int, dtype: Any = None) -> jax.Array:
        return jax.random.normal(next(self._keys), shape, jnp.float32).astype(dtype or self._dtype)

    def _full(self, value: int) -> jax.Array:
        return jnp.full(self.batch, value, jnp.int32)

    def _pool(self, ratio: int, width: int) -> Paged:
        """Every sequence's entries on pages in a random order."""
        page, table = self.geometry.span // ratio, self._table()
        return Paged(self._random(self.geometry.layers, table.size, page, width), table, table)

    def _table(self) -> jax.Array:
        columns = self.tokens // self.geometry.span
        table = jax.random.permutation(next(self._keys), self.batch * columns)
        return table.astype(jnp.int32).reshape(self.batch, columns)

    def _packed(self, ratio: int, packing: Packing) -> Packed:
        """As `_pool`, quantised. A few pages are packed and repeated: that takes less memory."""
        page, table = self.geometry.span // ratio, self._table()
        some = self._random(self.geometry.layers, min(16, table.size), page, packing.width)
        stored = jax.jit(packing.pack)(some)
        pages = jnp.take(stored, jnp.arange(table.size) % stored.shape[1], axis=1)
        return Packed(Paged(pages, table, table), packing)

    def _decode_attention(self) -> Iterator[Case]:
        g, size = self.geometry, self._dtype.itemsize
        q, sinks = (
            self._random(self.batch, g.heads, g.width),
            self._random(g.heads, dtype="float32"),
        )
        ring = self._random(g.layers, self.batch, g.window, g.width)
        at = self._full(self.tokens - 1)
        window = decode_operands.Window(ring, at, at + 1)
        # Of a published row of 512 values, 448 are e4m3 in groups of 64, and 64 are bfloat16.
        eighth = g.width // 8
        group = (g.width - eighth) // 7
        fp8 = Packing("fp8_rope", g.width, rope=eighth, group=group, align=128)
        kinds = [("hca", g.hca_ratio, None), ("csa", g.csa_ratio, None)]
        kinds += [(f"{name} fp8", ratio, fp8) for name, ratio, _ in kinds]
        for name, ratio, packing in kinds:
            seen, picked = self.tokens // ratio, None
            if name.startswith("csa"):
                k = min(g.topk, seen)
                picked = jax.random.permutation(next(self._keys), seen)[:k].astype(jnp.int32)
                picked = jnp.broadcast_to(picked, (self.batch, k))
                seen = k
            pool = self._packed(ratio, packing) if packing else self._pool(ratio, g.width)
            entries = decode_operands.Entries(pool, self._full(self.tokens // ratio), picked)
            rows, held = g.window + seen, packing.bytes if packing else g.width * size
            arrays = (q, sinks, window, entries)

            def run(layer, arrays, implementation, tiles=None, ratio=ratio):
                q, sinks, window, entries = arrays
                return decode_attention(
                    q,
                    layer=layer,
                    window=window,
                    entries=entries,
                    sinks=sinks,
                    scale=g.width**-0.5,
                    tile=min(TILE, self.tokens // ratio),
                    implementation=implementation,
                    tiles=tiles,
                )

            yield Case(
                op="decode_attention",
                name=f"{name} {self.tokens}",
                arrays=arrays,
                run=run,
                bytes=self.batch
                * (g.window * g.width * size + seen * held + g.heads * g.width * (size + 4)),
                flops=4 * self.batch * g.heads * rows * g.width,
                same=close,
                operands=decode_operands.Operands(q, sinks, 0, window, entries),
            )

    def _indexer(self) -> Iterator[Case]:
        g, seen = self.geometry, self.tokens // self.geometry.csa_ratio
        q = self._random(self.batch, g.index_heads, g.index_dim)
        weights = self._random(self.batch, g.index_heads, dtype="float32")
        visible, fp4 = self._full(seen), Packing("fp4", g.index_dim, align=128)

        def run(layer, arrays, implementation, tiles=None):
            q, weights, keys, visible = arrays
            options = dict(implementation=implementation, tiles=tiles)
            return select(q, weights, keys, layer=layer, visible=visible, k=g.topk, **options)

        for name, packing in (("", None), ("fp4 ", fp4)):
            keys = self._packed(g.csa_ratio, packing) if packing else None
            keys = keys or self._pool(g.csa_ratio, g.index_dim)
            held = packing.bytes if packing else g.index_dim * self._dtype.itemsize
            yield Case(
                op="indexer",
                name=f"{name}{self.tokens}",
                arrays=(q, weights, keys, visible),
                run=run,
                bytes=self.batch * (seen * held + 4 * g.topk),
                flops=2 * self.batch * seen * g.index_heads * g.index_dim,
                same=same_set,
                operands=index_operands.Operands(q, weights, 0, keys, visible),
                k=g.topk,
            )

    def _chunk_attention(self) -> Iterator[Case]:
        g, seen = self.geometry, self.tokens // self.geometry.hca_ratio
        q = self._random(self.batch, g.chunk, g.heads, g.width)
        window = chunk_operands.Window(
            self._random(g.layers, self.batch, g.window, g.width),
            self._random(self.batch, g.chunk, g.width),
            self._full(0),
        )
        entries = chunk_operands.Entries(self._pool(g.hca_ratio, g.width), None)
        start, count = self._full(self.tokens - g.chunk), self._full(g.chunk)
        rule = chunk_operands.Rule(g.width**-0.5, g.hca_ratio, min(TILE, seen))

        def run(layer, arrays, implementation, tiles=None):
            q, window, entries, start, count = arrays
            return chunk.chunk_attention(
                q,
                layer=layer,
                start=start,
                count=count,
                window=window,
                entries=entries,
                rule=rule,
                implementation=implementation,
                tiles=tiles,
            )

        rows = seen + g.window + g.chunk
        own = q.size * (self._dtype.itemsize + 4)
        yield Case(
            op="chunk_attention",
            name=f"hca {self.tokens}",
            arrays=(q, window, entries, start, count),
            run=run,
            bytes=self.batch * rows * g.width * self._dtype.itemsize + own,
            flops=4 * self.batch * g.chunk * g.heads * (seen + g.window) * g.width,
            same=close,
            operands=chunk_operands.Operands(q, None, 0, start, count, window, entries),
        )

    def _compressor(self) -> Iterator[Case]:
        g = self.geometry
        if not self.first:
            return
        for name, ratio, overlap in (("csa", g.csa_ratio, True), ("hca", g.hca_ratio, False)):
            how = Pooling(ratio, g.width, overlap, Rope(g.width // 8, 160_000.0), 1e-6, g.dtype)
            tail = self._random(g.layers, self.batch, how.held, 2 * how.series, dtype="float32")
            raw = self._random(self.batch, g.chunk, 2 * how.series, dtype="float32")
            pool = self._pool(ratio, g.width)
            norm = jnp.ones(g.width, jnp.float32)
            start, count = self._full(self.tokens - g.span), self._full(g.chunk)

            def run(layer, arrays, implementation, tiles=None, how=how):
                pool, norm, tail, raw, start, count = arrays
                where = dict(implementation=implementation)
                return compressor.store(how, pool, layer, norm, tail, raw, start, count, **where)

            made = self.batch * (g.chunk // ratio) * g.width * self._dtype.itemsize
            yield Case(
                op="compressor",
                name=f"{name} chunk of {g.chunk}",
                arrays=(pool, norm, tail, raw, start, count),
                run=run,
                bytes=raw.size * 4 + made,
                flops=6 * raw.size,
                same=lambda got, want: close(got.pages[0], want.pages[0]),
                keep=lambda arrays, pool: (pool, *arrays[1:]),
            )

    def _page_copy(self) -> Iterator[Case]:
        if not self.first:
            return
        pool = self._pool(self.geometry.csa_ratio, self.geometry.width)
        ids = pool.read.reshape(-1)[: max(1, pool.read.size // 2)]
        moved = pool.pages.nbytes // pool.pages.shape[1] * ids.size
        staged = self._random(pool.pages.shape[0], ids.size, *pool.pages.shape[2:])

        def gather(layer, arrays, implementation, tiles=None):
            pages, ids = arrays
            return page_copy.gather(pages, ids, salt=layer, implementation=implementation)

        def verify(layer, arrays, implementation, tiles=None):
            pages, ids = arrays
            return page_copy.verify(pages, ids, salt=layer, implementation=implementation)

        def scatter(layer, arrays, implementation, tiles=None):
            pages, staged, ids = arrays
            how = dict(salt=layer, implementation=implementation)
            return page_copy.scatter(pages, staged, ids, **how)

        for run, arrays, times in (
            (gather, (pool.pages, ids), 2),
            (verify, (pool.pages, ids), 1),
            (scatter, (pool.pages, staged, ids), 2),
        ):
            yield Case(
                op="page_copy",
                name=f"{run.__name__} {ids.size} pages",
                arrays=arrays,
                run=run,
                bytes=times * moved,
                flops=0,
                same=equal,
                keep=(lambda arrays, out: (out.pages, *arrays[1:])) if run is scatter else None,
            )
