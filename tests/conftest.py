"""Settings of every test run: JAX on the CPU, a compilation cache, suite budgets.

JAX is configured through the environment, before anything imports it, so that processes which
tests start have the same settings.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import tempfile
from collections import defaultdict

import hypothesis
import pytest

from tests import mappings

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Seconds of test time (set-up, call and tear-down, summed over workers, no compilation cache) that
# each suite may take on 2 cores in `make test`, and for parity in `make parity`. Without parity
# they add up to less than twice the 14 minutes that `make test` may take for them on two workers.
BUDGETS = {
    "hetero_kv": 880,
    "models": 390,
    "experiments": 265,
    "oracle": 10,
    "notebooks": 80,
    "readme": 35,
    "house": 10,
    "mappings": 5,
    "parity": 900,
}
_CACHE_LIMIT = 1 << 30  # bytes of compiled code kept between runs


def _cache_dir() -> pathlib.Path:
    """A writable directory for compiled code, one per jaxlib version and kind of processor."""
    try:
        processor = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        processor = "\n".join(s for s in processor.splitlines() if s.startswith(("flags", "model")))
    except OSError:
        processor = platform.processor()
    digest = hashlib.sha256(f"{platform.machine()} {processor}".encode()).hexdigest()[:8]
    name = f"jax-{importlib.metadata.version('jaxlib')}-{digest}"
    for parent in (ROOT / ".cache", pathlib.Path(tempfile.gettempdir()) / "hetero_kv_cache"):
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            return parent / name
    return pathlib.Path(tempfile.mkdtemp())


os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # set it to nothing for a run without the cache
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_cache_dir())
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# The interpreter of Mosaic GPU kernels, which came with JAX 0.12, has a warpgroup that waits hold a
# thread of XLA's pool; there are as many as cores, and with fewer than warpgroups a test can hang.
if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) >= (0, 12):
    os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

collect_ignore = [] if os.environ.get("HETERO_KV_PARITY") == "1" else ["parity"]


def pytest_configure(config: pytest.Config) -> None:
    """Empties the compilation cache when it has grown too large; workers leave it alone."""
    cache = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"] or os.devnull)
    if hasattr(config, "workerinput") or cache.parent != ROOT / ".cache":
        return
    if sum(file.stat().st_size for file in cache.parent.rglob("*-cache")) > _CACHE_LIMIT:
        shutil.rmtree(cache.parent, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks everything under tests/parity."""
    for item in items:
        if _suite(item.nodeid) == "parity":
            item.add_marker(pytest.mark.parity)


_spent: dict[str, float] = defaultdict(float)


def _suite(nodeid: str) -> str:
    """The directory below tests/ that a test is in, or the name of a file directly in tests/."""
    parts = nodeid.partition("::")[0].split("/")
    name = parts[1] if parts[0] == "tests" and len(parts) > 1 else parts[0]
    return name.removesuffix(".py").removesuffix("_test")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up the seconds of each suite."""
    _spent[_suite(report.nodeid)] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints each suite's seconds beside its budget; exceeding it is told, and fails nothing."""
    terminalreporter.section("seconds of test time per suite, and budget")
    for suite, seconds in sorted(_spent.items()):
        budget = BUDGETS.get(suite)
        text = f"{suite:<14} {seconds:7.1f} / {'none stated' if budget is None else budget}"
        terminalreporter.write_line(
            text + ("  OVER BUDGET" if budget is not None and seconds > budget else "")
        )


_watch = mappings.Watch()


def pytest_runtest_logfinish() -> None:
    """Between tests, not modules: one module can compile more than a process can hold."""
    _watch()
