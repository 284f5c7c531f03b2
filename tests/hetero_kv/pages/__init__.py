"""Tests of device pages."""
