"""The prefix store: keys, plans, leases, tiers. A key match is only a candidate for reuse."""

from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.policy import Policy
from hetero_kv.prefix.store import PrefixStore

__all__ = ["Identity", "Policy", "PrefixStore"]
