"""Tests of the disk tier: durability, damage, faults, limits."""
