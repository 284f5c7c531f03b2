"""Mutants of the store: each is a mistake that is easily made, and a check of the suite sees it.

A check is a test of this suite, called as it is. It passes on the code as it stands and fails under
every mutant that names it; a mutant that nothing sees would mean that the suite is blind there.
"""

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv import validate
from hetero_kv.prefix import keys, observe, plan, restore, store, upkeep
from hetero_kv.prefix import transfer as transfers
from hetero_kv.prefix.host import CORRUPT, STALE, Fetched, HostTier
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.payload import ArrayPayload
from tests.hetero_kv.prefix import (
    catalog_test,
    eviction_test,
    fault_kinds_test,
    identity_test,
    isolation_test,
    lifetime_test,
    plan_test,
    store_faults_test,
    store_requests_test,
    store_test,
    stores,
    world,
)

Check = Callable[[], None]
MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[Check, ...]]] = {}


def mutant(*checks: Check):
    """Registers a mutant and the checks that must see it."""

    def register(change):
        MUTANTS[change.__name__] = change, checks
        return change

    return register


def check(test: Callable, *arguments) -> Check:
    """A test of the suite with its arguments; those named `monkeypatch` get one of their own."""

    @functools.wraps(test)
    def run():
        names = test.__code__.co_varnames[: test.__code__.co_argcount]
        with pytest.MonkeyPatch.context() as patch:
            extra = {"monkeypatch": patch} if "monkeypatch" in names else {}
            test(*arguments, **extra)

    return run


# -- keys --------------------------------------------------------------------------------------


def rekeyed(patch: pytest.MonkeyPatch, change: Callable) -> None:
    """Keys of changed arguments; `change` gets (identity, tokens, tenant, extra)."""
    original = keys.block_keys

    def mutated(identity, tokens, tenant="", extra=None, *rest):
        return original(*change(identity, tokens, tenant, extra), *rest)

    for place in (
        keys,
        store,
        identity_test,
        __import__("hetero_kv.prefix.upkeep", fromlist=["x"]),
    ):
        if hasattr(place, "block_keys"):
            patch.setattr(place, "block_keys", mutated)


def ignored(field: str):
    """An identity that does not know of one field."""

    def change(patch):
        default = getattr(identity_test.identity(), field)

        def digest(self):
            self = dataclasses.replace(self, **{field: default})
            return Identity.__dict__["whole"].__get__(self)

        whole = Identity.__dict__["digest"].func
        patch.setattr(Identity, "whole", property(whole), raising=False)
        patch.setattr(Identity, "digest", property(digest))

    return change


for _name in identity_test.CHANGES:
    _check = check(identity_test.test_each_field_changes_the_identity_in_the_exact_regime, _name)
    MUTANTS[f"the identity ignores {_name}"] = ignored(_name), (_check,)


@mutant(
    check(store_test.test_forks_share_what_is_shared, 15),
    check(fault_kinds_test.test_c5_a_prompt_never_resumes_beyond_the_first_token_that_differs, 7),
    *(
        check(identity_test.test_each_token_changes_its_block_and_all_later_ones_only, x)
        for x in (7, 15, 39)
    ),
)
def the_last_token_of_a_block_is_skipped(patch):
    def change(identity, tokens, tenant, extra):
        tokens = np.array(tokens)
        tokens[identity.block - 1 :: identity.block] = 0
        return identity, tokens, tenant, extra

    rekeyed(patch, change)


@mutant(
    check(store_requests_test.test_tenants_never_see_each_other),
    check(identity_test.test_tenants_adapters_and_identities_share_nothing),
)
def the_tenant_is_forgotten(patch):
    rekeyed(patch, lambda identity, tokens, tenant, extra: (identity, tokens, "", extra))


@mutant(
    check(store_requests_test.test_adapters_and_media_never_mix),
    check(identity_test.test_media_changes_the_blocks_it_overlaps_and_those_after),
    check(identity_test.test_tenants_adapters_and_identities_share_nothing),
)
def what_is_extra_is_forgotten(patch):
    rekeyed(patch, lambda identity, tokens, tenant, extra: (identity, tokens, tenant, None))


@mutant(check(isolation_test.test_d3_d6_what_is_not_identified_is_neither_stored_nor_found, "a"))
def malformed_extra_counts_as_none(patch):
    patch.setattr(keys, "_extra", lambda extra, length: ("", []))


@mutant(check(identity_test.test_equal_blocks_of_different_prefixes_differ))
def keys_are_not_chained(patch):
    patch.setattr(keys, "_chain", lambda key, contents: [keys.sha256(x) for x in contents])


@mutant(
    check(fault_kinds_test.test_d1_prefixes_whose_digests_all_agree_are_told_apart_by_their_tokens)
)
def a_matching_digest_is_believed(patch):
    class Always(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other):
            return True

        def __ne__(self, other):
            return False

    original = keys.block_keys

    def believing(*arguments):
        found = original(*arguments)
        return dataclasses.replace(found, contents=tuple(map(Always, found.contents)))

    for place in (store, upkeep):
        if hasattr(place, "block_keys"):
            patch.setattr(place, "block_keys", believing)


# -- plans -------------------------------------------------------------------------------------


@mutant(
    check(plan_test.test_the_last_token_is_always_computed, 16, 0),
    check(store_test.test_every_length_of_a_prompt, 48),
    check(fault_kinds_test.test_c2_c10_prompts_around_every_boundary, 8),
)
def lookup_is_not_capped_before_the_last_token(patch):
    original = store.plan

    def longer(geometry, prompt_length, *arguments, **options):
        return original(geometry, prompt_length + 1, *arguments, **options)

    for place in (store, plan_test):
        patch.setattr(place, "plan", longer)


@mutant(
    check(plan_test.test_reasons_name_every_component_at_fault),
    check(fault_kinds_test.test_a1_history_without_state_is_no_hit),
)
def the_longest_component_counts_not_the_shortest(patch):
    patch.setattr(plan, "_newest", lambda geometry, presence, top: top)


@mutant(check(fault_kinds_test.test_a2_hole_in_history))
def history_may_have_holes(patch):
    patch.setattr(plan, "_leading", lambda flags: len(flags))


@mutant(
    check(plan_test.test_a_checkpoint_off_the_granularity_does_not_count),
)
def a_checkpoint_counts_at_any_length(patch):
    patch.setattr(plan, "_newest", lambda geometry, presence, top: max((*presence.checkpoints, 0)))


@mutant(
    check(store_test.test_a_b_a),
    check(fault_kinds_test.test_c2_c10_prompts_around_every_boundary, 33),
)
def a_checkpoint_is_used_at_another_length(patch):
    """That of the block before, with whatever protects the bytes switched off."""
    patch.setattr(ArrayPayload, "damaged", lambda self, label: "")
    patch.setattr(transfers.Transfer, "wrong_positions", lambda self, payload, length: "")
    read = HostTier.read

    def other(self, ticket, label):
        fetched = read(self, ticket, label)
        if b"checkpoint" in label and fetched.payload is not None:
            alike = (x for x in self._payloads if x and x.layout == fetched.payload.layout)
            return Fetched(next(alike).copy())
        return fetched

    patch.setattr(HostTier, "read", other)


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
    def careless(self, ticket, label):
        payload = self._payloads[ticket.slot]
        if payload is None:
            return Fetched(None, STALE)
        copy = payload.copy()
        component = copy.damaged(label)
        return Fetched(None, CORRUPT, component) if component else Fetched(copy)

    patch.setattr(HostTier, "read", careless)


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
    def stubborn(self, lease, capacity):
        for _ in range(50):
            got, failed = self._read(lease)
            if failed is None:
                blocks = len(lease.history)
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
        return original(self, dataclasses.replace(plan, resumable_length=candidate), *arguments)

    patch.setattr(observe.Observer, "restored", lying)


# ----------------------------------------------------------------------------------------------

CHECKS = {
    f"{name}-{i}": (change, one)
    for name, (change, checks) in MUTANTS.items()
    for i, one in enumerate(checks)
}


def test_there_are_mutants_enough():
    assert len(MUTANTS) >= 40 and world.B
    fields = {x.name for x in dataclasses.fields(Identity)}
    assert {f"the identity ignores {x}" for x in fields} <= set(MUTANTS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_suite_sees_it(name):
    change, one = CHECKS[name]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        change(patch)
        try:
            one()
        except (AssertionError, LookupError, AttributeError, pytest.fail.Exception) as error:
            # By what the check found, and not because the mutant itself is broken.
            assert traceback.extract_tb(error.__traceback__)[-1].filename != __file__
            return
    pytest.fail(f"nothing saw it: {one.__name__}")


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_passes_without_it(name):
    CHECKS[name][1]()
