"""BUILD lists every Python file, and its edges are the imports."""

import functools
import pathlib

from tests.house import build_file, import_graph

expected = functools.cache(build_file.expected)  # of this repository; it reads every file


def test_build_is_what_the_sources_say() -> None:
    have = build_file.parse((import_graph.ROOT / "BUILD").read_text())
    lines = build_file.differences(have, expected())
    assert not lines, "run `make format`:\n" + "\n".join(lines)


def test_every_file_has_its_own_target() -> None:
    targets = build_file.parse((import_graph.ROOT / "BUILD").read_text())
    listed = sorted(path for target in targets for path in target.srcs[:1] if path.endswith(".py"))
    assert listed == [path for path in import_graph.files() if path.endswith(".py")]


def test_edges_lead_to_targets() -> None:
    targets = build_file.parse((import_graph.ROOT / "BUILD").read_text())
    names = {":" + target.name for target in targets} | {":tree"}
    for target in targets:
        local = {edge for edge in target.deps + target.data if edge.startswith(":")}
        assert local <= names, target.name


def test_text_reads_back() -> None:
    want = expected()
    assert build_file.parse(build_file.render(want)) == want


def test_a_changed_import_is_noticed(tmp_path: pathlib.Path) -> None:
    files = {
        "hetero_kv/__init__.py": '"""Library."""\nfrom hetero_kv.contract import A\n',
        "hetero_kv/contract.py": "import jax.numpy as jnp\nA = jnp\n",
        "hetero_kv/state.py": "def f():\n    from . import contract\n    return contract\n",
        "experiments/run.py": 'import hetero_kv\nif __name__ == "__main__":\n    hetero_kv\n',
        "tests/state_test.py": "from hetero_kv import A, state\nPATH = 'tests/goldens/a.npz'\n",
        "tests/goldens/a.npz": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    targets = {target.name: target for target in build_file.expected(tmp_path)}
    assert targets["hetero_kv/__init__"].deps == (":hetero_kv/contract",)
    assert targets["hetero_kv/contract"].deps == ("@pypi//jax",)
    assert targets["hetero_kv/state"].deps == (":hetero_kv/contract",)
    assert targets["experiments/run"].rule == "py_binary"
    assert targets["experiments/run"].deps == (":hetero_kv/__init__",)
    test = targets["tests/state_test"]
    assert test.deps == (":hetero_kv/__init__", ":hetero_kv/state", "@pypi//pytest")
    assert test.data == (":tests/goldens/data",)

    (tmp_path / "hetero_kv/state.py").write_text("import hetero_kv.contract\nimport flax\n")
    have, want = list(targets.values()), build_file.expected(tmp_path)
    assert [line.split(":")[0] for line in build_file.differences(have, want)] == [
        "hetero_kv/state"
    ]
    (tmp_path / "hetero_kv/pages.py").write_text("")
    assert "not listed: hetero_kv/pages" in build_file.differences(
        have, build_file.expected(tmp_path)
    )
