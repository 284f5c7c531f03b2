"""Faults in device pages and slots: what lies in a paged cache between two calls.

Pages are sealed under the keys of the prefixes they end, so that a lease knows whose they are.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from hetero_kv.contract import CacheSpec
from hetero_kv.faults import forge, kinds, places
from hetero_kv.faults.forge import Material
from hetero_kv.faults.kinds import Case
from hetero_kv.pages import cache as paged
from hetero_kv.pages import table
from hetero_kv.pages.layout import history_slots
from hetero_kv.pages.table import PageTable
from hetero_kv.prefix.index import HISTORY
from hetero_kv.state import Cache

STRANGER = (0xBAD, 0xBAD)  # the digest of a request that a page was given to


def damage(
    spec: CacheSpec, case: Case, material: Material, cache: Cache, row: int, mate: int
) -> Cache:
    """Puts a fault of the moment DEVICE into a row that stands at `material.target.length`.

    mate: a row that holds the donor's pages.
    """
    if case.moment != kinds.DEVICE:
        raise ValueError(f"not a fault of resident state: {case}")
    if places.kind_of(spec, case.component) != HISTORY:
        leaves = forge.forged(spec, case, material)
        return places.overwrite_row(spec, cache, row, leaves, {})
    if case.kind == kinds.POSITION:
        return places.claim_length(cache, row, -spec.granularity)
    return _Pages(spec, case, cache, row).damaged(material, mate)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pages:
    """The pages of one component that a row reads."""

    spec: CacheSpec
    case: Case
    cache: Cache
    row: int

    @property
    def pages(self) -> PageTable:
        return self.cache.pages.tables[self.case.component]

    @property
    def columns(self) -> np.ndarray:
        """Those that the fault hits."""
        page = self.cache.pages.paging.page(self.case.component)
        used = page.pages_for(int(self.cache.length[self.row]))
        return np.arange(used - 1 if self.case.extent == kinds.LAST else 0, used)

    def damaged(self, material: Material, mate: int) -> Cache:
        kind, columns, pages = self.case.kind, self.columns, self.pages
        ids = np.asarray(pages.table)[self.row, columns]
        if kind == kinds.ENTRY:
            theirs = pages.table[mate, columns]
            return self._with(table=pages.table.at[self.row, columns].set(theirs))
        if kind == kinds.SHIFT_BLOCK:
            before = pages.table[self.row, np.maximum(columns - 1, 0)]
            return self._with(table=pages.table.at[self.row, columns].set(before))
        cache = self._filled(columns, ids, forge.forged(self.spec, self.case, material))
        done = dataclasses.replace(self, cache=cache)
        if kind == kinds.RELEASED:
            return done._with(
                form=pages.form.at[ids].set(table.ABSENT),
                generation=pages.generation.at[ids].add(1),
                owner=pages.owner.at[ids].set(0),
                count=pages.count.at[ids].set(0),
                shares=pages.shares.at[ids].set(0),
                checksum=pages.checksum.at[ids].set(0),
            )
        changes = {}
        if kind == kinds.COUNT:
            changes["count"] = pages.count.at[ids[-1]].add(-1)
        if kind in (kinds.GENERATION, kinds.REUSED):
            changes["generation"] = pages.generation.at[ids].add(1)
        if kind in (kinds.FOREIGN, kinds.OLD, kinds.REUSED):
            changes["owner"] = pages.owner.at[ids].set(jnp.array(STRANGER, jnp.uint32))
        if self.case.seal in (kinds.OWN, kinds.REMADE):
            sums = paged.checksums(self.spec, cache, self.case.component, jnp.asarray(ids))
            changes["checksum"] = pages.checksum.at[ids].set(sums)
        return done._with(**changes)

    def _filled(self, columns: np.ndarray, ids: np.ndarray, leaves: forge.Leaves) -> Cache:
        """Other entries in the pages, as far as a fault brings any."""
        entries = self.cache.pages.paging.page(self.case.component).entries
        changed = {}
        for slot in history_slots(self.spec)[self.case.component]:
            if slot.path not in leaves:
                continue
            pool, value = np.array(self.cache.leaf(slot)), leaves[slot.path]
            for column, page in zip(columns, ids, strict=True):
                part = value[:, column * entries : (column + 1) * entries]
                pool[:, page, : part.shape[1]] = part
            changed[slot] = jnp.array(pool)
        return self.cache.with_leaves(changed)

    def _with(self, **changes: object) -> Cache:
        tables = self.cache.pages.tables | {self.case.component: self.pages._replace(**changes)}
        return self.cache.replace(pages=self.cache.pages.replace(tables=tables))
