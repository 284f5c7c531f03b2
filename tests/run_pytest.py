"""Entry point of the py_test targets in BUILD: runs the test files that it is given."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
