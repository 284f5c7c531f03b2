"""Fixtures of the tests of models."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the functions that are compiled while the test runs."""
    names: list[str] = []

    def listen(event: str, _: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
