"""The disk tier: append-only, checksummed segments, and an index that can be made anew from them.

Nothing here maps a file into memory: whatever happens to a file is an error value, never a signal.
"""
