"""Prints what the parity tests counted: errors, and positions where index scores nearly tie."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Near-ties of all positions, and the largest error of any case."""
    found: dict[str, list] = {"near_ties": [], "max_error": []}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name in found and getattr(report, "when", "") == "call":
                    found[name].append(value)
    if found["near_ties"]:
        ties, positions = (sum(column) for column in zip(*found["near_ties"], strict=True))
        terminalreporter.section("parity with transformers")
        terminalreporter.write_line(
            f"near-ties: {ties} of {positions} positions; largest error of logits: "
            f"{max(found['max_error'], default=float('nan')):.1e}"
        )
