"""Directories in main memory where there is such a thing: thousands of syncs cost nothing there."""

import os
import pathlib
import tempfile

import pytest

MEMORY = "/dev/shm"


@pytest.fixture(scope="session")
def memory_directory():
    """A directory for the session."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield pathlib.Path(directory)


@pytest.fixture
def tmp_path(memory_directory):
    """Like pytest's, in that directory."""
    with tempfile.TemporaryDirectory(dir=memory_directory) as directory:
        yield pathlib.Path(directory)
