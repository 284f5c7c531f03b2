"""The import rules of the rooms: edges go one way, and each room keeps to its libraries."""

import ast
from collections.abc import Iterable

import pytest

from tests.house import import_graph
from tests.house.import_graph import Source

# Modules and packages of hetero_kv, earliest first: each may import from its own row and the rows
# above. A new one is added here first.
LAYERS = (
    ("arguments", "contract", "linear", "packing", "params", "metrics", "tensors"),
    ("state",),
    ("attention", "kernels", "pages", "validate", "snapshot", "bundle_files"),
    ("prefix", "accounting", "requests", "guard", "options"),
    ("sampling", "differences", "calls", "verifying"),
    ("rows",),
    ("kept", "slot_pages"),
    (
        *("engine", "engine_metrics", "scheduler", "audit", "bundle", "faults", "reusing"),
        *("endings", "decoding", "drafting"),
    ),
    ("__init__",),
)
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}

# Distributions that a room may import; a room that is not named may import any.
LIBRARIES = {
    "hetero_kv/kernels": {"jax", "jaxlib", "numpy"},
    "hetero_kv": {"jax", "jaxlib", "numpy", "ml_dtypes", "xxhash", "absl-py"},
}
# Pure maths of attention, arrays in and arrays out: the references of kernels are written with it.
MATHS = (
    "hetero_kv/packing.py",
    *(
        f"hetero_kv/attention/{name}.py"
        for name in ("attend", "norm", "pool", "ring", "rope", "selection", "when")
    ),
)
# Rooms of the repository that a room may import from.
ROOMS = {
    "hetero_kv/kernels": ("hetero_kv/kernels/", *MATHS),
    "hetero_kv": ("hetero_kv/",),
    "models": ("hetero_kv/", "models/"),
    "experiments": ("hetero_kv/", "models/", "experiments/", "configs/"),
    "configs": ("hetero_kv/", "models/", "experiments/", "configs/"),
}

SOURCES = import_graph.read()


def room(name: str) -> list[Source]:
    """The sources of a room."""
    return [source for path, source in SOURCES.items() if path.startswith(name + "/")]


def layer(path: str) -> str:
    """The module or package of hetero_kv that a file belongs to."""
    return path.split("/")[1].removesuffix(".py")


def upward(sources: Iterable[Source]) -> list[str]:
    """Edges within hetero_kv that lead to a later layer."""
    return [
        f"{source.path} ({layer(source.path)}) imports {target} ({layer(target)})"
        for source in sources
        for target in sorted(source.local)
        if target.startswith("hetero_kv/") and RANK[layer(target)] > RANK[layer(source.path)]
    ]


def test_every_import_leads_somewhere() -> None:
    unknown = [line for source in SOURCES.values() for line in source.unknown]
    assert not unknown, "\n".join(unknown)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not import_graph.cycle(SOURCES)


def test_every_module_has_a_layer() -> None:
    missing = {layer(source.path) for source in room("hetero_kv")} - RANK.keys()
    assert not missing, f"add to LAYERS: {sorted(missing)}"


def test_layers_go_one_way() -> None:
    edges = upward(source for source in room("hetero_kv") if layer(source.path) in RANK)
    assert not edges, "\n".join(edges)


def test_a_wrong_edge_is_noticed() -> None:
    sources = {
        path: import_graph.parse(path, text, {"hetero_kv.engine": "hetero_kv/engine.py"})
        for path, text in {
            "hetero_kv/state.py": "from hetero_kv import engine",
            "hetero_kv/audit.py": "from . import engine",
        }.items()
    }
    assert upward(sources.values()) == [
        "hetero_kv/state.py (state) imports hetero_kv/engine.py (engine)"
    ]


@pytest.mark.parametrize("name", ROOMS)
def test_room_imports_only_from_its_rooms(name: str) -> None:
    for source in room(name):
        wrong = [path for path in source.local if not path.startswith(ROOMS[name])]
        assert not wrong, f"{source.path} imports {wrong}"


@pytest.mark.parametrize("name", LIBRARIES)
def test_room_imports_only_its_libraries(name: str) -> None:
    for source in room(name):
        assert source.external <= LIBRARIES[name], source.path


def test_the_pure_maths_imports_nothing_but_itself() -> None:
    for path in MATHS:
        assert SOURCES[path].local <= set(MATHS), path


def test_flax_only_in_models() -> None:
    users = {path for path, source in SOURCES.items() if "flax" in source.external}
    assert all(path.startswith(("models/", "tests/models/")) for path in users), users


def test_flags_only_in_programs() -> None:
    rooms = ("experiments/", "tests/experiments/", "models/convert.py")
    for path, source in SOURCES.items():
        flags = [m for m in source.modules if m.startswith(("absl.flags", "absl.app"))]
        flags += [m for m in source.modules if m.startswith("ml_collections.config_flags")]
        assert not flags or path.startswith(rooms), (path, flags)


def test_the_library_never_prints() -> None:
    for source in room("hetero_kv"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called != "print" and not called.endswith("debug.print"), (
                    f"{source.path}:{node.lineno}: {called}"
                )
