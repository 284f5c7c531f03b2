"""Mutants of keys and plans: each is a mistake that is easily made and that a check here sees.

A check is a test of this suite, called as it is. It passes on the code as it stands and fails under
every mutant that names it; a mutant that nothing sees would mean that the suite is blind there.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

from hetero_kv.prefix import keys, plan, store, upkeep
from hetero_kv.prefix import transfer as transfers
from hetero_kv.prefix.host import Fetched, HostTier
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.payload import ArrayPayload
from tests.hetero_kv.prefix import (
    fault_kinds_test,
    identity_test,
    isolation_test,
    plan_test,
    store_requests_test,
    store_test,
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
        return found._replace(contents=tuple(map(Always, found.contents)))

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
