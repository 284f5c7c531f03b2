"""What each metric of a store means, and its text form."""

from collections.abc import Mapping

from hetero_kv import metrics
from hetero_kv.metrics import Family, Number
from hetero_kv.prefix.observe import NAMESPACE


def to_text(snapshot: Mapping[str, Number]) -> str:
    """The Prometheus text format of `PrefixStore.metrics()`."""
    return metrics.to_text(snapshot, FAMILIES, NAMESPACE)


_COUNTERS = {
    # requests
    "lookups_total": "Lookups.",
    "prompt_tokens_total": "Tokens of the prompts that were looked up.",
    "candidate_tokens_total": "Tokens that the keys of prompts matched for.",
    "resumable_tokens_total": "Tokens that all components could be resumed for, by the plan.",
    "shortened_total": "Shortenings of a prompt's length, by component and reason.",
    "hit_tokens_total": "Tokens that a component was resumed for, by where it came from.",
    "restores_total": "Restores.",
    "restored_tokens_total": "Prompt tokens reused: neither replayed nor computed.",
    "replay_tokens_total": "Prompt tokens replayed over stored history.",
    "computed_tokens_total": "Prompt tokens computed, as told by the model step.",
    "restored_bytes_total": "Bytes copied out by restores, by component and tier.",
    "approximate_restores_total": "Restores whose replay was too short to be exact.",
    "replans_total": "Plans made anew because a promise could not be kept.",
    "lost_tokens_total": "Tokens promised by a lookup that the restore could not deliver.",
    "flight_followers_total": "Requests that could wait for what another one computed.",
    "flight_timeouts_total": "Requests that waited for another one for too long.",
    "abandoned_leases_total": "Leases that were never released and became garbage.",
    # writing
    "publishes_total": "Publishes that were carried out, in part at least.",
    "publish_refused_total": "Publishes of which nothing was stored, by reason.",
    "publish_cut_total": "Publishes of which the end was left out, by reason.",
    "published_bytes_total": "Bytes stored by publishes, by component.",
    "stored_groups_total": "Groups stored, in whatever tier.",
    "stored_bytes_total": "Bytes of the groups stored.",
    "refused_total": "Groups that no tier had room for.",
    # life
    "evicted_groups_total": "Groups evicted from host memory that no tier holds any more.",
    "evicted_bytes_total": "Bytes of the groups evicted.",
    "demoted_groups_total": "Groups evicted from host memory that are still on disk.",
    "demoted_bytes_total": "Bytes of the groups demoted.",
    "promoted_groups_total": "Groups copied from disk to host memory, on use.",
    "promoted_bytes_total": "Bytes of the groups promoted.",
    "invalidated_groups_total": "Groups dropped because they may not be used, by reason.",
    "invalidated_bytes_total": "Bytes of the groups invalidated.",
    "stale_tickets_total": "Groups taken out of memory whose slot was no longer theirs.",
    "dropped_total": "Damaged groups, by the component at fault.",
    "healed_total": "Groups damaged in host memory that the disk still held.",
    "epochs_total": "Changes of the weights.",
    "quota_evicted_groups_total": "Groups evicted for a group of the same tenant.",
    "quota_refused_total": "Groups that a tier did not take because of a quota.",
    # disk
    "disk_read_bytes_total": "Bytes of payloads read from disk.",
    "disk_written_bytes_total": "Bytes of records written to disk.",
    "disk_evicted_groups_total": "Groups evicted from disk.",
    "disk_evicted_bytes_total": "Bytes of the groups evicted from disk.",
    "disk_refused_total": "Groups that the disk did not take, by reason.",
    "disk_lost_total": "Groups that were on disk, or waited to be, and are lost, by reason.",
    "disk_dropped_total": "Groups found damaged on disk by a check.",
    "disk_read_failures_total": "Reads from disk that failed, by reason.",
    "disk_flush_failures_total": "Flushes that could not make everything durable, by reason.",
    "disk_errors_total": "Errors of the operating system, by operation.",
    "disk_unusable_total": "Directories that could not be used.",
    "disk_compacted_segments_total": "Segments rewritten without their dead bytes.",
    "disk_orphans_total": "Groups found on disk that belong nowhere.",
    "disk_shrunk_bytes_total": "Bytes dropped at a start with a lower limit.",
    "disk_torn_bytes_total": "Bytes cut off segments at a start.",
    "disk_rescanned_total": "Segments that a start had to scan.",
    "disk_index_errors_total": "Failures to write the index.",
    "disk_index_ignored_total": "Indexes that a start could not use.",
    "disk_ignored_files_total": "Files that are not used, by reason.",
    "disk_ignored_removed_total": "Files that were not used and had to make room.",
}
_HISTOGRAMS = {
    "lookup_seconds": "Duration of lookups.",
    "restore_seconds": "Duration of restores.",
    "publish_seconds": "Duration of publishes.",
    "flush_seconds": "Duration of flushes.",
    "disk_read_seconds": "Duration of reads from disk that succeeded.",
    "disk_write_seconds": "Duration of writes of one record.",
    "lifetime_seconds": "From the time that a group was stored to its eviction.",
    "reuse_gap_seconds": "From one use of a group to the next; storing it counts as one.",
}
_GAUGES = {
    "host_capacity_bytes": "Bytes that host memory may hold.",
    "host_free_bytes": "Bytes of them that nobody owns.",
    "host_used_bytes": "Bytes of them that groups of a kind own.",
    "host_peak_bytes": "The most bytes that were ever owned.",
    "leases_open": "Leases that are not released.",
    "epochs_retained": "Epochs of the weights whose groups are kept, the present one included.",
    "disk_queue_depth": "Records that wait to be written.",
    "disk_queued_bytes": "Bytes of the records that wait.",
    "disk_capacity_bytes": "Bytes that the directory may take.",
    "disk_live_bytes": "Bytes of records that can be read.",
    "disk_dead_bytes": "Bytes that compaction would give back.",
    "disk_overhead_bytes": "Bytes of headers and of the index.",
    "disk_free_bytes": "Bytes that nobody owns.",
    "disk_peak_bytes": "The most bytes that were ever taken.",
    "disk_segments": "Segment files.",
    "disk_ignored_files": "Files that are not used but take room, by reason.",
}
FAMILIES = {
    **{name: Family("counter", text) for name, text in _COUNTERS.items()},
    **{name: Family("histogram", text) for name, text in _HISTOGRAMS.items()},
    **{name: Family("gauge", text) for name, text in _GAUGES.items()},
}
