"""The advice as a page."""

from collections.abc import Mapping

from experiments.bench.report import Table
from experiments.exhibit import Exhibit


def exhibit(results: Mapping) -> Exhibit:
    """Questions and answers, and the numbers of every window policy."""
    config = results["config"]
    answers = [[x["question"], x["verdict"], x["why"]] for x in results["answers"]]
    rows = [
        [
            name,
            f"{x['hash_hit']:.1%}",
            f"{x['resumed']:.1%}",
            f"{x['checkpoints']:,}",
            *(f"{x[field]:,.2f}" for field in ("cold_s", "saved_s", "reading_s", "net_s")),
        ]
        for name, x in results["policies"].items()
    ]
    note = (
        f"{results['requests']:,} requests, {config['host_gb']:g} GB of host memory read at "
        f"{config['host_bytes_per_s'] / 1e9:g} GB/s; prefill at {config['flops_per_s']:.2g} "
        "operations a second. Seconds of all prompts together."
    )
    columns = ("window policy", "hash hit", "resumed", "checkpoints", "cold s", "saved s",
               "reading s", "net s")  # fmt: skip
    tables = [
        Table("Answers", ("question", "answer", "why"), answers),
        Table("Window policies", columns, rows, note),
    ]
    return Exhibit(f"Advice: {results['name']} on {results['trace']}", tables=tables)
