"""The disk part of bench_store runs, and measures every object size in both directions."""

from experiments.bench import disk_bench


def test_a_small_run(tmp_path):
    config = disk_bench.DiskConfig(
        directory=str(tmp_path),
        object_bytes=(4096, 65536),
        total_bytes=1 << 18,
        group_bytes=1 << 17,
        capacity_bytes=1 << 24,
        repeats=2,
    )
    rows = disk_bench.run(config)
    assert [(x["object_bytes"], x["direction"]) for x in rows] == [
        (4096, "put"),
        (4096, "get"),
        (65536, "put"),
        (65536, "get"),
    ]
    assert all(x["ratio"] > 0 and x["turns"] == 2 for x in rows)
    assert list(tmp_path.iterdir()) == []
