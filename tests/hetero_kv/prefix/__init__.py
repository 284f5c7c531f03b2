"""Tests of the prefix store."""
