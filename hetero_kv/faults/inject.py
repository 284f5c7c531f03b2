"""Puts one fault into a store, or into a restored row."""

import dataclasses

from hetero_kv.contract import CacheSpec
from hetero_kv.faults import forge, kinds, places
from hetero_kv.faults.forge import Material
from hetero_kv.faults.kinds import Case
from hetero_kv.prefix.index import CHECKPOINT, HISTORY, Group, Node
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.payload import label
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.state import Cache

_FAR = 1000  # from the generation that a record should have


@dataclasses.dataclass(frozen=True)
class Injector:
    """Faults for one stored prefix of `material.target.length` tokens.

    keys: of the prompt, as the store made them. donor, foreign, old: of the donor's prompt, and of
    the same prompt under another tenant and another epoch; for the labels of misplaced groups.
    """

    spec: CacheSpec
    material: Material
    keys: Keys
    donor: Keys
    foreign: Keys
    old: Keys

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return self.material.target.length

    def damage(self, case: Case, store: PrefixStore) -> None:
        """Puts a fault into what is stored: at rest, or between lookup and restore."""
        if case.moment == kinds.ROW or case.guard == kinds.IDENTITY:
            raise ValueError(f"nothing is forged in a store for: {case}")
        kind = places.kind_of(self.spec, case.component)
        nodes = places.path(store, self.keys, self.length)
        some = places.groups(nodes, kind, case.extent)
        if case.kind == kinds.DROP:
            self._drop(case, store, some)
        elif case.kind == kinds.EVICTED:
            places.evict(store, some[0])
        elif case.kind == kinds.GENERATION:
            self._recycle(case, store, nodes, some)
        elif case.seal == kinds.OWN:
            self._misplace(case, store, some)
        else:
            leaves = forge.forged(self.spec, case, self.material)
            for group in some:
                payload = places.held(store, group)
                name = group.label if case.seal == kinds.REMADE else None
                buffer = places.filled(payload, leaves)
                places.put(store, group, places.sealed(payload, buffer, name))

    def damage_row(self, case: Case, cache: Cache, row: int) -> Cache:
        """Puts a fault into a row that was just restored."""
        if case.moment != kinds.ROW:
            raise ValueError(f"not a fault of a row: {case}")
        history = places.kind_of(self.spec, case.component) == HISTORY
        if case.kind == kinds.POSITION and history:
            return places.claim_length(cache, row, -self.spec.granularity)
        leaves = forge.forged(self.spec, case, self.material)
        first = places.starts(self.spec, self.length, case.extent)
        return places.overwrite_row(self.spec, cache, row, leaves, first)

    # -- inside --------------------------------------------------------------------------------

    @staticmethod
    def _drop(case: Case, store: PrefixStore, some: list[Group]) -> None:
        if case.seal == kinds.REMADE:
            for group in some:
                payload = places.held(store, group)
                short = places.without(payload, case.component, group.label)
                places.put(store, group, short)
        elif case.moment == kinds.DISK:
            for group in some:
                places.kill(store, group)
        else:
            places.evict(store, some[0])

    def _recycle(
        self, case: Case, store: PrefixStore, nodes: list[Node], some: list[Group]
    ) -> None:
        """Another object has the place, and the same label: only its generation tells."""
        forged = {}
        for group in some:
            payload = places.held(store, group)
            buffer = places.filled(payload, self.material.donor.leaves)
            forged[group] = places.sealed(payload, buffer, group.label)
        if case.moment == kinds.DISK:
            for group, payload in forged.items():
                places.put(store, group, payload, generation=_FAR)
            return
        state = nodes[-1].checkpoint
        if (
            some[0].kind == HISTORY and state
        ):  # it goes with the block, and is there again as it was
            forged[state] = places.held(store, state)
        places.evict(store, some[0])
        for group, payload in forged.items():
            places.recycle(store, group, payload)

    def _misplace(self, case: Case, store: PrefixStore, some: list[Group]) -> None:
        """Whole groups that are right in themselves, in the place of others."""
        of = self.material
        held, keys, earlier = {
            kinds.STALE: (of.donor, self.donor, 0),
            kinds.FOREIGN: (of.other, self.foreign, 0),
            kinds.OLD: (of.other, self.old, 0),
            kinds.SHIFT_BLOCK: (of.target, self.keys, 1),
        }[case.kind]
        if case.kind == kinds.SHIFT_BLOCK and some[0].kind == CHECKPOINT:
            held, earlier = of.before, self.spec.granularity // self.spec.block
        for group in some:
            depth = group.node.depth - earlier
            if depth < 1:
                continue  # nothing is before the first
            payload = places.held(store, group)
            shift = earlier if group.kind == HISTORY else 0
            buffer = places.filled(payload, held.leaves, shift)
            name = label(group.kind, keys.keys[depth - 1], depth)
            places.put(store, group, places.sealed(payload, buffer, name))
