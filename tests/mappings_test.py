"""What is compiled can be forgotten, and is, between any two tests."""

import subprocess
import sys

import pytest

from tests import conftest, mappings

PROGRAMS = """
import functools, types, sys
import jax, jax.numpy as jnp
from tests import mappings

held = types.ModuleType("tests.held")
sys.modules["tests.held"] = held

@functools.cache
def program(n):
    made = jax.jit(lambda x: jnp.sin(x) + n)
    made(jnp.ones(n)).block_until_ready()
    return made

held.program = program
program(1)
before = mappings.count()
for n in range(2, 30):
    program(n)
most = mappings.count()
mappings.forget()
print(before, most, mappings.count(), program.cache_info().currsize)
"""


@pytest.mark.skipif(not mappings.count(), reason="mappings cannot be counted here")
def test_forgetting_gives_mappings_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS], capture_output=True, text=True, check=True
    )
    before, most, after, held = map(int, done.stdout.split())
    assert most > before + 28 and after <= before and held == 0


def test_it_is_looked_at_between_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    now, found, forgotten = [0.0], [mappings.MOST - 1], []
    monkeypatch.setattr(mappings, "count", lambda: found[0])
    monkeypatch.setattr(mappings, "forget", lambda: forgotten.append(now[0]))
    monkeypatch.setattr(conftest, "_watch", mappings.Watch(lambda: now[0]))
    for now[0], found[0] in ((9.0, 0), (18.0, mappings.MOST), (18.5, mappings.MOST), (27.0, 9)):
        conftest.pytest_runtest_logfinish()
    assert forgotten == [18.0]
