"""Tests of the fault harness, and by it of the checks."""
