"""The host's books of what slots hold: pages given, shared and taken back; nothing without pages.

The books are the lease of rule 11: what a row's pages were when they were given (generation, owner)
goes into every call that reads them, and is compared with the page table there. They also say who
gets pages back: a damaged block table is not asked.

A sealed page of a prefix has a name, its column and the key of the block that completes it, which
vouches for all tokens before (rule 9). While a row refers to it, or it is kept beyond its last row
(see kept.py), rows with the same cached prefix get it through their block tables.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from hetero_kv.kept import Kept
from hetero_kv.metrics import Counters, Number, series
from hetero_kv.pages import table
from hetero_kv.pages.admission import Given, Some, Want
from hetero_kv.pages.brought import Brought
from hetero_kv.pages.layout import PageSpec
from hetero_kv.pages.validate import Expected
from hetero_kv.rows import Rows
from hetero_kv.state import Cache

NAMED = 1 << 31  # set in owners that are keys of prefixes, and in no owner that is a request


class PagesLost(RuntimeError):
    """The page table and the books do not agree on what is free: the cache is of no use."""


class NoRoom(RuntimeError):
    """Pages that were to be shared turned out changed, and there are too few free ones instead.

    cache: the present one.
    """

    def __init__(self, cache: Cache):
        super().__init__("pages to share have changed, and there are too few others")
        self.cache = cache


class Prefix(NamedTuple):
    """A prefix whose pages may be shared.

    keys: per complete block of the prompt. length: tokens that come from elsewhere (the store).
    """

    keys: tuple[bytes, ...] = ()
    length: int = 0


NOTHING = Prefix()
Name = tuple[int, bytes]  # column, and key of the block that completes the page


class SlotPages:
    """What the slots of one engine hold."""

    def __init__(self, rows: Rows, counters: Counters, keep: bool = False):
        self._rows, self._counters, self._keeps = rows, counters, keep
        self._pages: tuple[PageSpec, ...] = rows.paging.pages if rows.paging else ()
        self._block = rows.spec.block
        self.clear()

    # -- questions -----------------------------------------------------------------------------

    @property
    def paged(self) -> bool:
        """Whether there are any pages."""
        return self._rows.paging is not None

    def refusal(self, tokens: int) -> str:
        """Why so many tokens can never be held, and what to do about it, or ""."""
        for page in self._pages:
            need = page.pages_for(tokens)
            if need > page.count:
                return (
                    f"needs {need} pages of {page.component!r}, but the pool has {page.count}; "
                    "ask for fewer tokens, or make larger pools (Paging.of(…, count=…))"
                )
        return ""

    def fits(self, tokens: int, prefix: Prefix = NOTHING, leaving: Iterable[int] = ()) -> bool:
        """Whether there are pages for a request of `tokens`, once these slots are vacated."""
        leaving = list(leaving)
        for c, page in enumerate(self._pages):
            refs = self._refs[c].copy()
            gone = self._ids[c, leaving]
            np.subtract.at(refs, gone[gone < page.count], 1)
            shared = self._shareable(c, prefix, refs)
            spare = np.count_nonzero(refs == 0) - np.count_nonzero(refs[shared] == 0)
            if page.pages_for(tokens) - len(shared) > spare:
                return False
        return True

    def expected(self, slot: int | None = None) -> Expected | None:
        """What the pages of all rows, or of one, were given as."""
        if not self.paged:
            return None
        some = slice(None) if slot is None else slice(slot, slot + 1)
        return Expected(self._generation[:, some], self._owner[:, some])

    def brought(self, slot: int, brought: Brought | None) -> Brought | None:
        """What a restore has brought, and what the slot got by sharing beside it."""
        if brought is None:
            return None
        return brought._replace(shared=self._whole[:, slot].copy())

    def shared(self, slot: int) -> dict[str, int]:
        """Pages that the slot got by sharing, by component."""
        return {x.component: int(self._whole[c, slot]) for c, x in enumerate(self._pages)}

    def held_blocks(self, slot: int) -> int:
        """Leading blocks whose History is in pages that the slot got by sharing."""
        blocks = len(self._keys[slot]) if self._pages else 0
        for c, page in enumerate(self._pages):
            entries = self._whole[c, slot] * page.entries
            while blocks and page.contract.count(blocks * self._block) > entries:
                blocks -= 1
        return blocks

    def exceeds(self, slot: int, length: int) -> bool:
        """Whether the slot shares pages beyond `length` tokens, which it could not write."""
        return any(
            self._whole[c, slot] * page.entries > page.contract.count(length)
            for c, page in enumerate(self._pages)
        )

    def gauges(self) -> dict[str, Number]:
        """Pages by component: free, kept without a row, of one row, of several; for metrics."""
        found: dict[str, Number] = {}
        for c, page in enumerate(self._pages):
            refs, kept = self._refs[c], self._is_kept(c)
            counts = {"free": (refs == 0) & ~kept, "kept": (refs == 0) & kept}
            counts |= {"owned": refs == 1, "shared": refs > 1}
            for state, which in counts.items():
                name = series("pages", component=page.component, state=state)
                found[name] = int(np.count_nonzero(which))
        return found

    def problems(self, cache: Cache) -> list[str]:
        """Where the books and the page table differ (rule 7); an empty list: nowhere."""
        if not self.paged:
            return []
        found, (tables, ledgers) = [], self._rows.page_books(cache)
        for c, page in enumerate(self._pages):
            pages, name = tables[page.component], page.component
            refs = np.zeros(page.count, np.int64)
            held = self._ids[c, :, : page.columns]
            np.add.at(refs, held[held < page.count], 1)
            if not np.array_equal(refs, self._refs[c]):
                found.append(f"{name}: references in the books do not add up")
            if not np.array_equal(pages.table, held):
                found.append(f"{name}: block tables are not those of the books")
            kept = self._is_kept(c)
            if not np.array_equal(pages.shares, refs + kept):
                found.append(f"{name}: shares are not the references of the books")
            if not np.array_equal(pages.pins, kept):
                found.append(f"{name}: pins are not the kept pages of the books")
            free, held = np.count_nonzero(pages.form == table.ABSENT), np.count_nonzero(refs | kept)
            if free + held != page.count:
                found.append(f"{name}: {free} free + {held} held or kept != {page.count}")
            if not ledgers[name].exact:
                found.append(f"{name}: the page table's own ledger is not exact")
            if any(refs[i] == 0 and not kept[i] for i in self._named[c].values()):
                found.append(f"{name}: a free page has a name")
            if {i: x for x, i in self._named[c].items()} != self._names[c]:
                found.append(f"{name}: names and pages do not correspond")
        return found

    # -- changes: each takes and returns the cache -----------------------------------------------

    def clear(self) -> None:
        """Nobody holds anything: of a new cache."""
        comps, slots = len(self._pages), self._rows.slots
        self._most = max((x.columns for x in self._pages), default=0)
        none = np.array([x.count for x in self._pages], np.int32)
        shape = (comps, slots, self._most)
        self._ids = np.broadcast_to(none[:, None, None], shape).copy()
        self._generation = np.zeros(shape, np.int32)
        self._owner = np.zeros((*shape, 2), np.uint32)
        self._whole = np.zeros((comps, slots), np.int32)  # leading columns got by sharing
        self._sealed = np.zeros((comps, slots), np.int32)  # leading columns with names
        self._refs = [np.zeros(x.count, np.int64) for x in self._pages]
        self._kept = [Kept() for _ in self._pages]
        self._named: list[dict[Name, int]] = [{} for _ in self._pages]
        self._names: list[dict[int, Name]] = [{} for _ in self._pages]
        self._keys: list[tuple[bytes, ...]] = [()] * slots
        self._owners: list[np.ndarray | None] = [None] * slots  # of pages once they are sealed
        self._restored = [0] * slots

    def enter(
        self,
        cache: Cache,
        slot: int,
        number: int,
        tokens: int,
        prefix: Prefix = NOTHING,
        *,
        share: bool = True,
    ) -> Cache:
        """The slot starts over at length 0, with pages for `tokens` tokens.

        The pages that the prefix has in them already are shared; the others of its length await a
        copy (LOADING), which `settle` ends. number: of the request.

        Raises NoRoom and PagesLost; the slot has nothing then, and the cache given is gone.
        """
        if not self.paged:
            return self._rows.reset(cache, slot)
        owner = np.array([number & 0xFFFFFFFF, 1 + (number >> 32)], np.uint32)
        while True:
            want = self._want(tokens, prefix if share else NOTHING, prefix.length, owner)
            cache = self._make_room(cache, want)
            cache, given = self._rows.admit(cache, slot, want)
            if not given.flags:
                break
            if not given.changed.any():
                names = [x for x, bit in table.FLAGS.items() if int(given.flags) & bit]
                raise PagesLost(f"a row was not given its pages: {names}")
            self._condemn(want, given.changed)
            if not self.fits(tokens, prefix if share else NOTHING):
                raise NoRoom(cache)
        self._note(slot, want, given)
        self._keys[slot], self._restored[slot] = prefix.keys, prefix.length
        return cache

    def settle(self, cache: Cache, slot: int, restored: int | None = None) -> Cache:
        """Ends the copy into the slot's pages, and seals and names what is exact by now.

        restored: tokens that the copy has brought; None: it was that or another call that told.
        """
        if restored is not None:
            self._restored[slot] = restored
        if not self.paged or not (self._keys[slot] or self._restored[slot]):
            return cache
        keys, owners = self._keys[slot], self._owners[slot]
        if owners is None:
            owners = self._owners[slot] = self._short(keys)
        named = len(keys) * self._block
        cache, done = self._rows.settle(cache, slot, owners, self._restored[slot], named)
        if done.flags:
            return cache  # the next call finds out what is wrong, and refuses the row
        for c, page in enumerate(self._pages):
            first, stop = int(self._sealed[c, slot]), int(done.filled[c])
            for column in range(first, stop):
                self._owner[c, slot, column] = owners[c, column]
                name, i = self._name(page, column, keys), int(self._ids[c, slot, column])
                if self._named[c].setdefault(name, i) == i:
                    self._names[c][i] = name
            self._sealed[c, slot] = max(first, stop)
        return cache

    def exact(self, cache: Cache, slot: int) -> Prefix:
        """What a saved copy of the slot may get back by sharing."""
        if not self.paged:
            return NOTHING
        length = min(int(np.asarray(cache.length)[slot]), len(self._keys[slot]) * self._block)
        exact = max(self._restored[slot], int(np.asarray(cache.grid_length)[slot]))
        return Prefix(self._keys[slot], min(length, exact))

    def fail_load(self, cache: Cache, slot: int) -> Cache:
        """The copy into the slot's pages has failed; whoever reads them is refused."""
        return self._rows.fail_load(cache, slot) if self.paged else cache

    def leave(self, cache: Cache, slot: int) -> Cache:
        """The slot gives up all it holds; with `poison`, what nobody owns is NaN."""
        if not self.paged:
            return self._rows.leave(cache, slot)
        if self._keeps:
            cache = self._keep(cache, slot)
        ids, left = self._ids[:, slot].copy(), np.zeros((len(self._pages), self._most), np.int32)
        for c, page in enumerate(self._pages):
            held = ids[c][ids[c] < page.count]
            self._refs[c][held] -= 1
            left[c, ids[c] < page.count] = self._refs[c][held]
            for i in held[self._refs[c][held] == 0].tolist():
                if i not in self._kept[c]:
                    self._unname(c, i)
            self._ids[c, slot] = page.count
        self._generation[:, slot], self._owner[:, slot] = 0, 0
        self._whole[:, slot], self._sealed[:, slot] = 0, 0
        self._keys[slot], self._owners[slot], self._restored[slot] = (), None, 0
        return self._rows.revoke(cache, slot, ids, left)

    def drop_kept(self, cache: Cache) -> Cache:
        """Lets all pages go that no row refers to."""
        every = (kept.drop(len(kept), self._in_use(c)) for c, kept in enumerate(self._kept))
        return self._dropped(cache, list(every))

    def distrust(self, slot: int) -> None:
        """A call has refused the slot: nobody gets its pages by sharing any more."""
        for c, page in enumerate(self._pages):
            held = self._ids[c, slot, : page.columns]
            for i in held[held < page.count].tolist():
                self._unname(c, i)

    # -- pages beyond their last row -------------------------------------------------------------

    def _is_kept(self, c: int) -> np.ndarray:
        """bool[P]."""
        kept = np.zeros(self._pages[c].count, bool)
        kept[self._kept[c].pages()] = True
        return kept

    def _keep(self, cache: Cache, slot: int) -> Cache:
        """The pages of the slot that have names stay when it leaves."""
        new: list[list[tuple[int, int]]] = []
        for c, page in enumerate(self._pages):
            held = self._ids[c, slot, : page.columns].tolist()
            named = [(i, self._generation_of(c, i)) for i in held if i in self._names[c]]
            new.append([x for x in named if x[0] not in self._kept[c]])
            if named:
                self._kept[c].use(*zip(*named, strict=True))
        if not any(new):
            return cache
        cache, flags = self._rows.keep(cache, self._some(new))
        for c in np.flatnonzero(flags).tolist():  # damaged: they go with the row
            for i, _ in new[c]:
                self._kept[c].forget(i)
                self._unname(c, i)
        return cache

    def _make_room(self, cache: Cache, want: Want) -> Cache:
        """Lets as many kept pages go as a row needs beyond those that are free."""
        if not self._keeps:
            return cache
        gone: list[list[tuple[int, int]]] = []
        for c, page in enumerate(self._pages):
            shared = want.ids[c, : want.whole[c]].tolist()
            need = page.pages_for(int(want.tokens)) - len(shared)
            need -= np.count_nonzero((self._refs[c] == 0) & ~self._is_kept(c))
            gone.append(self._kept[c].drop(max(0, need), {*shared, *self._in_use(c)}))
        return self._dropped(cache, gone)

    def _dropped(self, cache: Cache, gone: list[list[tuple[int, int]]]) -> Cache:
        for c, page in enumerate(self._pages):
            for i, _ in gone[c]:
                self._unname(c, i)
                self._counters.add("dropped_pages_total", component=page.component)
        while any(gone):
            part, gone = [x[: self._most] for x in gone], [x[self._most :] for x in gone]
            cache = self._rows.drop(cache, self._some(part).ids)
        return cache

    def _in_use(self, c: int) -> list[int]:
        return np.flatnonzero(self._refs[c]).tolist()

    def _some(self, pages: list[list[tuple[int, int]]]) -> Some:
        shape = len(self._pages), self._most
        ids, generation = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for c, found in enumerate(pages):
            ids[c] = self._pages[c].count  # no page
            for n, (i, bumped) in enumerate(found):
                ids[c, n], generation[c, n] = i, bumped
        return Some(ids, generation, np.array([len(x) for x in pages], np.int32))

    # -- inside --------------------------------------------------------------------------------

    def _want(self, tokens: int, prefix: Prefix, load: int, owner: np.ndarray) -> Want:
        comps = len(self._pages)
        ids, generation = (np.zeros((comps, self._most), np.int32) for _ in "ab")
        whole = np.zeros(comps, np.int32)
        for c in range(comps):
            found = self._shareable(c, prefix, self._refs[c])
            whole[c] = len(found)
            ids[c, : len(found)] = found
            generation[c, : len(found)] = [self._generation_of(c, i) for i in found]
        return Want(ids, generation, whole, np.int32(tokens), np.int32(load), owner)

    def _shareable(self, c: int, prefix: Prefix, refs: np.ndarray) -> list[int]:
        """Pages of the leading columns of a prefix, as far as somebody holds or keeps them."""
        page, found = self._pages[c], []
        for column in range(page.contract.count(prefix.length) // page.entries):
            i = self._named[c].get(self._name(page, column, prefix.keys), -1)
            if i < 0 or (refs[i] == 0 and i not in self._kept[c]):
                break
            found.append(i)
        return found

    def _generation_of(self, c: int, i: int) -> int:
        """That of a page somebody holds or keeps, by the books."""
        if (kept := self._kept[c].generation(i)) is not None:
            return kept
        return int(self._generation[c][self._ids[c] == i][0])

    def _name(self, page: PageSpec, column: int, keys: tuple[bytes, ...]) -> Name:
        contract = page.contract
        end = ((column + 1) * page.entries - 1) * contract.stride + contract.span  # tokens
        return column, keys[(end - 1) // self._block]

    def _short(self, keys: tuple[bytes, ...]) -> np.ndarray:
        """u32[C, n, 2]: short digests of names, for columns that have one."""
        found = np.zeros((len(self._pages), self._most, 2), np.uint32)
        for c, page in enumerate(self._pages):
            for column in range(page.contract.count(len(keys) * self._block) // page.entries):
                _, key = self._name(page, column, keys)
                short = int.from_bytes(key[:8], "little") ^ column * 0x9E3779B97F4A7C15
                found[c, column] = short & 0xFFFFFFFF, short >> 32 & 0xFFFFFFFF | NAMED
        return found

    def _note(self, slot: int, want: Want, given: Given) -> None:
        """Into the books what the slot was given."""
        for c, page in enumerate(self._pages):
            held = given.ids[c, : page.columns]
            held, whole = held[held < page.count], int(want.whole[c])
            if np.any((self._refs[c] + self._is_kept(c))[held[whole:]]):
                raise PagesLost(f"{page.component!r}: pages were given that somebody holds")
            self._refs[c][held] += 1
            self._ids[c, slot, : page.columns] = given.ids[c, : page.columns]
            self._whole[c, slot] = self._sealed[c, slot] = whole
            if whole:
                self._counters.add("shared_pages_total", whole, component=page.component)
                self._revived(c, held[:whole])
        self._generation[:, slot], self._owner[:, slot] = given.generation, given.owner

    def _revived(self, c: int, shared: np.ndarray) -> None:
        """Pages of a prefix are shared; some of them may have been nobody's."""
        kept = [(i, self._kept[c].generation(i)) for i in shared.tolist() if i in self._kept[c]]
        if kept:
            self._kept[c].use(*zip(*kept, strict=True))
        alone = np.count_nonzero(self._refs[c][shared] == 1)
        name = self._pages[c].component
        self._counters.add("revived_pages_total", alone, component=name)

    def _condemn(self, want: Want, changed: np.ndarray) -> None:
        """Pages whose bytes have changed are not shared any more."""
        for c, page in enumerate(self._pages):
            for i in want.ids[c][changed[c]].tolist():
                self._unname(c, i)
                self._counters.add("corrupt_pages_total", component=page.component)

    def _unname(self, c: int, i: int) -> None:
        self._kept[c].spoil(i)
        name = self._names[c].pop(i, None)
        if name is not None:
            del self._named[c][name]
