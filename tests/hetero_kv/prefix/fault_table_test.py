"""Faults that other systems have had (groups A to H, J and M), and the tests here that see them.

A1   fault_kinds_test::test_a1_history_without_state_is_no_hit
A2   fault_kinds_test::test_a2_hole_in_history
     fault_kinds_test::test_a2_a6_a_hole_in_a_ring_is_not_stored_and_not_restored
A3   fault_kinds_test::test_a3_a5_windows_of_several_widths_resume_jointly
A5   fault_kinds_test::test_a3_a5_windows_of_several_widths_resume_jointly
A6   fault_kinds_test::test_a2_a6_a_hole_in_a_ring_is_not_stored_and_not_restored
A8   reuse_exact_test::test_every_multiple_of_g_resumes_exactly
A9   does not apply: rings are not evicted by pages; a checkpoint goes with the history under it:
     catalog_test::test_a_checkpoint_goes_with_the_history_under_it
A10  store_test::test_every_length_of_a_prompt
B1   fault_kinds_test::test_b1_any_component_that_falls_short_shortens_all
B2   fault_kinds_test::test_b2_what_is_gone_between_lookup_and_fetch_shortens_the_hit
B4   does not apply: there is no drafter; its cache would be components of the same groups
B5   fault_kinds_test::test_a1_history_without_state_is_no_hit
B6   fault_kinds_test::test_b6_a_slot_handed_out_keeps_nothing_of_its_last_request
B7   does not apply: nothing beside the cache is indexed by physical slot
B8   fault_kinds_test::test_b8_a_restart_keeps_every_place_to_resume
B10  fault_kinds_test::test_b10_m2_objects_that_go_one_by_one_leave_no_half_groups_and_no_orphans
C1   fault_kinds_test::test_c1_c12_a_checkpoint_stands_where_its_tokens_end
     store_test::test_every_kind_of_contract_alone
C2   fault_kinds_test::test_c2_c10_prompts_around_every_boundary
C4   fault_kinds_test::test_c4_components_of_different_units
C5   fault_kinds_test::test_c5_a_prompt_never_resumes_beyond_the_first_token_that_differs
C6   fault_kinds_test::test_c6_m8_the_shortest_prefix_that_can_hit_is_told_and_true
C8   fault_kinds_test::test_c8_no_token_is_left_out_or_computed_twice
C10  fault_kinds_test::test_c2_c10_prompts_around_every_boundary
     store_test::test_rows_do_not_disturb_each_other
C12  fault_kinds_test::test_c1_c12_a_checkpoint_stands_where_its_tokens_end
C13  lifetime_test::test_h1_h2_a_cache_of_another_size_gets_every_row_at_its_position
C15  fault_kinds_test::test_c15_the_same_prompt_five_times
D1   fault_kinds_test::test_d1_prefixes_whose_digests_all_agree_are_told_apart_by_their_tokens
     store_requests_test::test_colliding_keys_are_misses
D2   identity_test::test_media_changes_the_blocks_it_overlaps_and_those_after
D3   isolation_test::test_d3_d6_what_is_not_identified_is_neither_stored_nor_found
     identity_test::test_placeholder_tokens_need_a_digest
D5   isolation_test::test_d5_the_same_tokens_of_all_are_kept_apart
D6   isolation_test::test_d3_d6_what_is_not_identified_is_neither_stored_nor_found
D7   isolation_test::test_d7_d9_no_tier_serves_a_stranger
D9   isolation_test::test_d7_d9_no_tier_serves_a_stranger
D11  identity_test::test_keys_are_equal_in_every_process
D12  isolation_test::test_d12_one_dtype_is_not_read_as_another_of_its_size
     isolation_test::test_d12_d15_what_another_identity_stored_is_not_found
D14  identity_test::test_effective_dtypes_are_read_off_the_leaves
D15  isolation_test::test_d15_weights_that_differ_in_one_bit_share_nothing
     isolation_test::test_d12_d15_what_another_identity_stored_is_not_found
D16  mutation_test::test_the_suite_sees_it
D18  does not apply: the store converts nothing; a leaf has one dtype, which is in the identity
E1   isolation_test::test_e1_an_update_of_the_weights_makes_old_prefixes_miss
E2   isolation_test::test_e2_nothing_is_older_than_the_epochs_that_are_kept
E4   isolation_test::test_e1_an_update_of_the_weights_makes_old_prefixes_miss
     isolation_test::test_e2_nothing_is_older_than_the_epochs_that_are_kept
F1   lifetime_test::test_f1_pressure_during_a_restore_takes_nothing_that_is_promised
F2   lifetime_test::test_f2_promotion_out_of_a_full_disk_into_full_memory
F4   soak_test::test_threads_over_a_store_far_too_small
F6   lifetime_test::test_f6_a_cache_may_go_while_its_groups_wait_to_be_written
F8   lifetime_test::test_f8_g2_an_unreadable_tier_costs_the_hit_and_is_not_asked_for_ever
F9   lifetime_test::test_f9_a_reader_slower_than_deletion_gets_nothing
F10  lifetime_test::test_f10_a_publish_that_dies_at_any_step_leaves_nothing_behind
     lifetime_test::test_f10_a_tier_that_raises_leaves_the_ledger_exact
F11  lifetime_test::test_f11_a_thousand_requests_cancelled_before_and_during_their_restore
F13  lifetime_test::test_f13_what_went_to_disk_and_is_computed_again_has_one_owner
F15  lifetime_test::test_f15_a_storm_of_cancelled_requests_does_not_touch_a_bystander
F16  lifetime_test::test_f16_churn_larger_than_the_store_brings_no_phantom_back
F17  store_test::test_a_b_a
     reuse_exact_test::test_a_b_a_in_one_slot_of_a_small_store
F18  lifetime_test::test_f18_cleaning_up_after_a_failed_read_spares_what_was_published_since
F20  engine, later: there is no map of pages yet
F22  lifetime_test::test_h1_h2_a_cache_of_another_size_gets_every_row_at_its_position
G1   store_disk_test::test_a_damaged_byte_shortens_the_hit
     disk.damage_test::test_a_flipped_bit_in_a_segment_costs_one_object_at_most
G2   lifetime_test::test_f8_g2_an_unreadable_tier_costs_the_hit_and_is_not_asked_for_ever
     lifetime_test::test_g2_a_store_that_always_fails_ends_in_a_cold_start_after_one_retry
G4   store_disk_test::test_a_restart_finds_everything_again
G5   store_disk_test::test_a_smaller_limit_keeps_prefixes_whole
G7   lifetime_test::test_g7_layers_in_another_order_are_another_format
H1   lifetime_test::test_h1_h2_a_cache_of_another_size_gets_every_row_at_its_position
     store_faults_test::test_a_row_outside_the_batch_is_an_error_not_a_neighbour
H2   lifetime_test::test_h1_h2_a_cache_of_another_size_gets_every_row_at_its_position
H4   lifetime_test::test_h4_the_serial_form_of_every_leaf_is_pinned
     disk.tier_test::test_records_are_stored_in_the_form_that_version_1_has
H6   lifetime_test::test_h6_parts_of_every_kind_of_component_are_copied_alone
J1   lifetime_test::test_j1_what_is_published_from_a_padded_batch_has_no_padding_in_it
J2   lifetime_test::test_j2_j3_a_restore_touches_its_row_alone
     store_faults_test::test_a_row_outside_the_batch_is_an_error_not_a_neighbour
J3   lifetime_test::test_j2_j3_a_restore_touches_its_row_alone
J5   engine, later: padding of a prefill's tail is the model's and the engine's
M1   eviction_test::test_every_order_is_leaf_first_and_keeps_the_ledger
     store_test::test_kinds_keep_their_shares
M2   fault_kinds_test::test_b10_m2_objects_that_go_one_by_one_leave_no_half_groups_and_no_orphans
M4   does not apply: a matter of speed, which experiments/bench_store.py measures
M6   fault_kinds_test::test_m6_edits_of_the_last_message_and_regeneration_hit
M7   does not apply: which points are kept is the policy's, which experiments/replay.py compares
M8   fault_kinds_test::test_c6_m8_the_shortest_prefix_that_can_hit_is_told_and_true
M10  fault_kinds_test::test_m10_counters_equal_what_was_done
"""

import ast
import pathlib
import re

HERE = pathlib.Path(__file__).parent
KINDS = {
    "A": (1, 2, 3, 5, 6, 8, 9, 10),
    "B": (1, 2, 4, 5, 6, 7, 8, 10),
    "C": (1, 2, 4, 5, 6, 8, 10, 12, 13, 15),
    "D": (1, 2, 3, 5, 6, 7, 9, 11, 12, 14, 15, 16, 18),
    "E": (1, 2, 4),
    "F": (1, 2, 4, 6, 8, 9, 10, 11, 13, 15, 16, 17, 18, 20, 22),
    "G": (1, 2, 4, 5, 7),
    "H": (1, 2, 4, 6),
    "J": (1, 2, 3, 5),
    "M": (1, 2, 4, 6, 7, 8, 10),
}


def table() -> dict[str, str]:
    """What the table says, by kind of fault."""
    found, kind = {}, ""
    for line in __doc__.splitlines()[2:]:
        if line.strip():
            kind = line[:5].strip() or kind
            found[kind] = f"{found.get(kind, '')} {line[5:].strip()}".strip()
    return found


def test_the_table_is_complete_and_every_test_in_it_is_there():
    rows = table()
    assert list(rows) == [f"{group}{n}" for group, numbers in KINDS.items() for n in numbers]
    for kind, text in rows.items():
        named = re.findall(r"([\w.]+)::(test_\w+)", text)
        assert named or re.match(r"does not apply: |engine, later: ", text), kind
        for module, name in named:
            path = HERE / f"{module.replace('.', '/')}.py"
            defined = ast.parse(path.read_text()).body
            assert name in {x.name for x in defined if isinstance(x, ast.FunctionDef)}, (kind, name)


def test_every_test_that_names_a_kind_is_in_the_table():
    rows = table()
    for path in HERE.glob("*_test.py"):
        for one in ast.parse(path.read_text()).body:
            if isinstance(one, ast.FunctionDef):
                prefix = re.match(r"test_((?:[a-hjm]\d+_)+)", one.name)
                for kind in prefix[1].rstrip("_").upper().split("_") if prefix else ():
                    assert one.name in rows[kind], (kind, one.name)
