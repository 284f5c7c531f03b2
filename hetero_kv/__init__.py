"""Resumable prefixes for hybrid-attention models: contracts, caches, checks, a store, an engine."""

from hetero_kv.engine import Engine
from hetero_kv.options import Options
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.requests import Request, Result, Sampling

__all__ = ["Engine", "Options", "PrefixStore", "Request", "Result", "Sampling"]
