"""Validators that run in the very call that uses the pages (DESIGN rule 11).

`check_static` raises while a call is traced. `check` is traceable and reports a Verdict: no branch,
no shape and no compile depends on what it finds.
"""

import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hetero_kv import validate
from hetero_kv.contract import LAYOUT_VERSION, CacheSpec
from hetero_kv.pages import cache as paged
from hetero_kv.pages import table
from hetero_kv.pages.layout import PageSpec, history_slots
from hetero_kv.pages.table import PageTable
from hetero_kv.state import Cache
from hetero_kv.validate import Verdict

PAGES_VERSION = 1  # part of the ABI code: bump when the arrays of pages change their meaning


class Expected(NamedTuple):
    """What the pages of each row were when they were leased, by component and column.

    Columns are those of the component with most; others are padded with anything.
    """

    generation: jax.Array  # i32[C, R, n]
    owner: jax.Array  # u32[C, R, n, 2]


def expect(cache: Cache) -> Expected:
    """What the block tables say now: to be kept while they are leased, and given to each call."""
    # In the order of the paging: a dictionary that went through a transformation is sorted.
    tables = [cache.pages.tables[x.component] for x in cache.pages.paging.pages]
    most = max((x.table.shape[1] for x in tables), default=0)

    def padded(field: str) -> list[jax.Array]:
        found = (x.column(field, x.table) for x in tables)
        return [
            jnp.pad(x, ((0, 0), (0, most - x.shape[1]), *((0, 0),) * (x.ndim - 2))) for x in found
        ]

    return Expected(jnp.stack(padded("generation")), jnp.stack(padded("owner")))


def abi_code(spec: CacheSpec, cache: Cache) -> int:
    """A number (32 bits) for all that a kernel must know of the layout of pages.

    Versions, the order of components, and per leaf its name, dtype, layers, entries per page, width
    and packing. Not the number of pages or rows, which kernels take from the shapes.
    """
    about: list = [LAYOUT_VERSION, PAGES_VERSION]
    for page in cache.pages.paging.pages:
        about.append((page.component, page.span, page.contract.stride, page.contract.span))
        for slot in history_slots(spec)[page.component]:
            pool = cache.leaf(slot)
            shape = (pool.shape[0], *pool.shape[2:])
            about.append((slot.path, str(pool.dtype), shape, slot.leaf.stride_bytes))
            if slot.leaf.packing is not None:
                about.append(slot.leaf.packing)
    digest = hashlib.blake2b(repr(about).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def check_static(spec: CacheSpec, cache: Cache, abi: int | None = None) -> None:
    """Raises ValueError where the arrays of pages are not as declared.

    Checks that pages align with blocks, that rows align with bytes, shapes and dtypes; and that the
    layout has the code `abi` that a kernel, or a lease, was made for (None: any).
    """
    paging = cache.pages.paging
    if paging.capacity != cache.capacity:
        raise ValueError(f"pages for rows of {paging.capacity} tokens, not of {cache.capacity}")
    for name, slots in history_slots(spec).items():
        page, columns = paging.page(name), cache.pages.tables[name].table.shape
        if page.span % page.contract.stride or (page.span % spec.block and spec.block % page.span):
            raise ValueError(
                f"{name!r}: pages of {page.span} tokens do not align with blocks of {spec.block}"
            )
        if columns != (cache.batch, page.columns):
            raise ValueError(f"{name!r}: block tables {columns}, not {cache.batch, page.columns}")
        for slot in slots:
            leaf, pool = slot.leaf, cache.leaf(slot)
            want = (slot.repeats, page.count, page.entries, *leaf.width)
            if pool.shape != want or pool.dtype != jnp.dtype(leaf.dtype):
                raise ValueError(
                    f"{slot.path}: pages are {pool.dtype}{list(pool.shape)}, declared are "
                    f"{leaf.dtype}{list(want)}"
                )
            if leaf.row_bytes % leaf.align:
                raise ValueError(
                    f"{slot.path}: rows of {leaf.row_bytes} bytes do not lie at multiples of "
                    f"{leaf.align}; pad their width, or lower Leaf.align"
                )
    if abi is not None and abi != abi_code(spec, cache):
        raise ValueError(
            f"made for pages of layout {abi:#010x}, these are of {abi_code(spec, cache):#010x}"
        )


def check(
    spec: CacheSpec,
    cache: Cache,
    expected: Expected | None = None,
    count: jax.Array | int = 0,
    rows: jax.Array | None = None,
    *,
    writes: bool | jax.Array = True,
    finite: bool = False,
    sealed: bool = False,
) -> Verdict:
    """Whether rows may go on by i32[R] `count` tokens with the state that the cache holds.

    Evidence against lengths (`validate.evidence`) over all components, and of their pages: form,
    generation and owner as leased, valid entries as the length says, and that those to be written
    may be. Works on contiguous caches too, which have evidence only.

    Args:
        expected: of the lease; None: generations and owners are not compared.
        rows: bool[R], rows to check; others get the verdict ok. None: all.
        writes: False: the tokens write no History (replay).
        finite: also that live entries are finite (reads all of them: for tests and audits).
        sealed: also that sealed pages have the bytes that were sealed (reads all of them).
    """
    verdict = validate.evidence(spec, cache, finite=finite)
    names = validate.components(spec)
    bits = dict(zip(names, verdict.bits.T, strict=True))
    if cache.pages is not None:
        check_static(spec, cache)
        length = jnp.clip(cache.length, 0, cache.capacity)
        stop = jnp.clip(length + count, 0, cache.capacity)
        for c, page in enumerate(cache.pages.paging.pages):
            name, pages = page.component, cache.pages.tables[page.component]
            seen = _Columns(page, pages, length)
            found = seen.missing() | seen.counted()
            if expected is not None:
                n = page.columns
                found |= seen.leased(expected.generation[c, :, :n], expected.owner[c, :, :n], stop)
            start = jnp.where(writes, length, stop)
            found |= seen.written(table.writable(pages, cache.pages.owner), start, stop)
            if finite:
                found |= _not_finite(spec, cache, seen)
            if sealed:
                found |= _changed(spec, cache, seen)
            bits[name] = bits[name] | _any(found)
    parts = jnp.stack([bits[name] != 0 for name in names[:-1]], axis=-1)
    partly = jnp.any(parts, axis=-1) & ~jnp.all(parts, axis=-1)
    bits[validate.LENGTHS] = bits[validate.LENGTHS] | validate.bit(partly, validate.JOINT)
    found = jnp.stack([bits[name] for name in names], axis=-1)
    if rows is not None:
        found = jnp.where(rows[:, None], found, jnp.uint32(0))
    return Verdict(found, jnp.all(found == 0, axis=-1))


class _Columns:
    """The block tables of one component, [R, n], beside what lengths i32[R] ask of them.

    Each check gives bits u32[R, n].
    """

    def __init__(self, page: PageSpec, pages: PageTable, length: jax.Array):
        self.page, self.pages, self.length = page, pages, length
        self.ids = pages.safe(pages.table)
        self.form = pages.column("form", self.ids)
        self.column = jnp.arange(page.columns, dtype=jnp.int32)
        entries = page.contract.count(length)[:, None] - self.column * page.entries
        self.held = jnp.clip(entries, 0, page.entries)  # entries that each page must hold
        self.read = self.held > 0

    def missing(self) -> jax.Array:
        fine = (self.form == table.WRITING) | (self.form == table.COMPLETE)
        return validate.bit(self.read & ~fine, validate.MISSING)

    def counted(self) -> jax.Array:
        count = self.pages.column("count", self.ids)
        wrong = (self.form == table.WRITING) & (count != self.held)
        wrong |= (self.form == table.COMPLETE) & (count < self.held)
        return validate.bit(wrong, validate.VALID)

    def leased(self, generation: jax.Array, owner: jax.Array, stop: jax.Array) -> jax.Array:
        """Of pages that are read, or written on the way to `stop`."""
        used = self.column < paged.pages_for(self.page, stop)[:, None]
        stale = self.pages.column("generation", self.ids, -1) != generation
        differs = self.pages.column("owner", self.ids) != owner
        other = differs[..., 0] | differs[..., 1]  # a reduction would not fuse
        found = validate.bit(used & stale, validate.GENERATION)
        return found | validate.bit(used & other, validate.OWNER)

    def written(self, may: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
        before, after = (self.page.contract.count(x)[:, None] for x in (start, stop))
        first, last = before // self.page.entries, paged.pages_for(self.page, stop)[:, None]
        new = (self.column >= first) & (self.column < last) & (after > before)
        return validate.bit(new & (may >= self.pages.size), validate.WRITE)


def _not_finite(spec: CacheSpec, cache: Cache, seen: _Columns) -> jax.Array:
    found = jnp.zeros(seen.ids.shape, jnp.uint32)
    row = jnp.arange(seen.page.entries, dtype=jnp.int32)
    for slot in history_slots(spec)[seen.page.component]:
        pool = cache.leaf(slot)
        if slot.leaf.poison is not None:
            bad = ~jnp.all(
                jnp.isfinite(slot.leaf.numbers(pool)), axis=(0, *range(3, pool.ndim))
            )  # [P, e]
            bad = bad.at[seen.ids].get(mode="fill", fill_value=False)  # [R, n, e]
            bad = jnp.any(bad & (row < seen.held[..., None]), axis=-1)
            found |= validate.bit(bad, validate.NONFINITE)
    return found


def _changed(spec: CacheSpec, cache: Cache, seen: _Columns) -> jax.Array:
    ids = jnp.arange(seen.pages.size, dtype=jnp.int32)
    sums = paged.checksums(spec, cache, seen.page.component, ids)
    bad = (sums != seen.pages.checksum) & (seen.pages.form == table.COMPLETE)
    bad = bad.at[seen.ids].get(mode="fill", fill_value=False)
    return validate.bit(bad & seen.read, validate.CHECKSUM)


def _any(bits: jax.Array) -> jax.Array:
    """u32[R, n] to u32[R]: one reduction for all reasons."""
    return jax.lax.reduce(bits, jnp.uint32(0), jax.lax.bitwise_or, (1,))
