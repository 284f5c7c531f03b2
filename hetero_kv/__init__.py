"""Resumable prefixes for hybrid-attention models: contracts, caches, checks, a store."""
