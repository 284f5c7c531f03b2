"""Mutants of evidence, tiers, the catalog and counters; see mutants.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import validate
from hetero_kv.faults import checks
from hetero_kv.prefix import observe, restore, store
from hetero_kv.prefix import transfer as transfers
from hetero_kv.prefix.host import HostTier
from hetero_kv.prefix.payload import ArrayPayload
from tests.hetero_kv.prefix import (
    catalog_test,
    eviction_test,
    fault_kinds_test,
    lifetime_test,
    store_faults_test,
    store_test,
    stores,
    world,
)
from tests.hetero_kv.prefix.mutants import MUTANTS, check, mutant

# -- evidence ----------------------------------------------------------------------------------


def fresh_transfers(patch: pytest.MonkeyPatch) -> None:
    """Nothing that was compiled before the mutation may be used under it."""
    patch.setattr(store, "transfer_for", transfers.Transfer)


def blind(component: str):
    def change(patch):
        fresh_transfers(patch)
        original = validate.evidence

        def evidence(spec, *arguments, **options):
            verdict = original(spec, *arguments, **options)
            names = validate.components(spec)
            keep = jnp.asarray([x != component for x in names])
            bits = jnp.where(keep, verdict.bits, jnp.uint32(0))
            return validate.Verdict(bits, jnp.all(bits == 0, axis=-1))

        patch.setattr(validate, "evidence", evidence)

    return change


for _name, _component in (
    ("entries_count", "csa entries"),
    ("keys_count", "csa index keys"),
    ("window_pos", "windows"),
    ("tail_pos", "tails"),
):
    _checks = [check(store_test.test_evidence_that_disagrees_stops_a_publish, _name)]
    if _name.endswith("pos"):
        _hole = fault_kinds_test.test_a2_a6_a_hole_in_a_ring_is_not_stored_and_not_restored
        _checks.append(check(_hole, _name))
    MUTANTS[f"the validator skips {_component}"] = blind(_component), tuple(_checks)


@mutant(
    check(store_test.test_evidence_that_disagrees_stops_a_publish, "window_pos"),
    check(fault_kinds_test.test_a2_a6_a_hole_in_a_ring_is_not_stored_and_not_restored, "tail_pos"),
)
def publish_does_not_look_at_evidence(patch):
    original = transfers.Transfer.inspect

    def trusting(self, cache, row):
        length, grid_length, verdict = original(self, cache, row)
        return length, grid_length, verdict._replace(ok=np.ones(1, bool))

    patch.setattr(transfers.Transfer, "inspect", trusting)


@mutant(check(store_test.test_state_off_the_grid_or_from_decode_is_left_out))
def state_made_by_decode_is_published(patch):
    original = transfers.Transfer.inspect

    def greedy(self, cache, row):
        length, _, verdict = original(self, cache, row)
        return length, length, verdict

    patch.setattr(transfers.Transfer, "inspect", greedy)


@mutant(
    check(store_faults_test.test_a_checkpoint_with_positions_of_another_length_is_refused),
    check(
        fault_kinds_test.test_a2_a6_a_hole_in_a_ring_is_not_stored_and_not_restored, "window_pos"
    ),
)
def restore_does_not_look_at_evidence(patch):
    patch.setattr(transfers.Transfer, "wrong_positions", lambda self, payload, length: "")


@mutant(check(store_test.test_dead_rows_are_stored_in_canonical_form))
def dead_rows_are_stored_as_they_are(patch):
    fresh_transfers(patch)
    patch.setattr(transfers, "_canonical", lambda spec, section, value, length: value)


# -- tiers -------------------------------------------------------------------------------------


@mutant(
    check(store_faults_test.test_a_flipped_bit_anywhere_shortens_the_hit, "history", 3, 16),
    check(fault_kinds_test.test_b1_any_component_that_falls_short_shortens_all, "checkpoint"),
)
def checksums_are_not_verified(patch):
    patch.setattr(ArrayPayload, "damaged", lambda self, label: "")


@mutant(check(store_faults_test.test_swapped_payloads_are_noticed))
def checksums_do_not_cover_whose_bytes_they_are(patch):
    seal = ArrayPayload.seal.__func__
    damaged = ArrayPayload.damaged
    patch.setattr(
        ArrayPayload,
        "seal",
        classmethod(lambda cls, layout, label, buffer: seal(cls, layout, b"", buffer)),
    )
    patch.setattr(ArrayPayload, "damaged", lambda self, label: damaged(self, b""))


@mutant(
    check(catalog_test.test_slots_are_recycled_and_generations_are_not),
    check(catalog_test.test_a_read_that_is_overtaken_is_stale),
)
def generations_are_not_compared(patch):
    patch.setattr(HostTier, "read", checks.read_whatever_is_there)


@mutant(
    check(
        fault_kinds_test.test_b2_what_is_gone_between_lookup_and_fetch_shortens_the_hit,
        "history",
        7,
        24,
    ),
    check(store_faults_test.test_objects_recycled_between_lookup_and_restore),
    check(store_faults_test.test_a_flipped_bit_anywhere_shortens_the_hit, "checkpoint", 6, 32),
)
def restore_trusts_the_lookup(patch):
    def trusting(self, got, groups, length):
        for group in groups:
            fetched, tier = self.read_group(group)
            payload = fetched.payload
            if payload is None:  # a failure is logged, and ignored
                layout = store_layouts(self, group)
                buffer = np.zeros(layout.nbytes, np.uint8)
                payload = ArrayPayload(layout, buffer, ())
            got.append(restore.Delivered(payload, tier))

    def store_layouts(fetcher, group):
        transfer = fetcher._transfer
        if group.kind == "checkpoint":
            return transfer.checkpoint_layout
        return transfer.history_layout(group.node.depth - 1)

    patch.setattr(restore.Fetcher, "_read_into", trusting)


@mutant(check(lifetime_test.test_g2_a_store_that_always_fails_ends_in_a_cold_start_after_one_retry))
def restore_tries_for_ever(patch):
    def stubborn(self, lease, capacity, held):
        for _ in range(50):
            blocks = max(0, len(lease.history) - held)
            got, failed = self._read(lease, lease.groups()[len(lease.history) - blocks :])
            if failed is None:
                return got[:blocks], (got[blocks] if lease.checkpoint else None)
            self._replan(lease, capacity, failed)
        return [], None

    patch.setattr(restore.Fetcher, "_fetch", stubborn)


@mutant(check(catalog_test.test_reads_are_copies_and_checked))
def tiers_hand_out_their_own_bytes(patch):
    patch.setattr(ArrayPayload, "copy", lambda self: self)


# -- the catalog -------------------------------------------------------------------------------


def classes_with(name: str) -> list[type]:
    """The classes of the host's catalog that define a method."""
    return [x for x in type(stores.make().catalog).__mro__ if name in vars(x)]


@mutant(
    check(catalog_test.test_leased_groups_outlive_any_pressure),
    check(lifetime_test.test_f1_pressure_during_a_restore_takes_nothing_that_is_promised),
)
def pins_do_not_hold(patch):
    for place in classes_with("_evictable"):
        original = vars(place)["_evictable"]

        def loose(self, group, original=original):
            pins, group.pins = group.pins, 0
            try:
                return original(self, group)
            finally:
                group.pins = pins

        patch.setattr(place, "_evictable", loose)


@mutant(
    check(eviction_test.test_every_order_is_leaf_first_and_keeps_the_ledger, "fifo", None),
)
def eviction_takes_the_middle(patch):
    for place in classes_with("_evictable"):
        patch.setattr(place, "_evictable", lambda self, group: not group.pins)


@mutant(check(store_faults_test.test_a_lease_is_released_after_an_error))
def a_lease_left_by_an_error_is_not_released(patch):
    from hetero_kv.prefix.lease import Lease

    def leave(self, kind, *rest):
        if kind is None:
            self.release()

    patch.setattr(Lease, "__exit__", leave)


@mutant(
    check(lifetime_test.test_f18_cleaning_up_after_a_failed_read_spares_what_was_published_since)
)
def cleaning_up_goes_by_key(patch):
    for place in classes_with("discard"):
        original = vars(place)["discard"]

        def by_key(self, group, original=original):
            now = (
                group.node
                if group.node.group(group.kind)
                else self.index._nodes.get(group.node.key)
            )
            return original(self, (now and now.group(group.kind)) or group)

        patch.setattr(place, "discard", by_key)


# -- counters ----------------------------------------------------------------------------------


@mutant(check(fault_kinds_test.test_m10_counters_equal_what_was_done))
def counters_tell_what_was_looked_up(patch):
    original = observe.Observer.restored

    def lying(self, plan, *arguments):
        candidate = plan.candidate_length // world.G * world.G
        return original(self, plan._replace(resumable_length=candidate), *arguments)

    patch.setattr(observe.Observer, "restored", lying)
