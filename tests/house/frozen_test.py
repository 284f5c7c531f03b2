"""Frozen dataclasses are values: each can be hashed, or says with eq=False that it is itself alone.

What is compared field by field and cannot be hashed fails far from here: as a key, in a set, as a
static argument; and a comparison of arrays is no truth value.
"""

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.house import import_graph
from tests.house.import_graph import Source

ROOMS = ("hetero_kv/", "models/", "experiments/")
UNHASHABLE = {"dict", "list", "set", "Mapping", "MutableMapping", "ndarray", "Array", "Params"}
OPAQUE = {"Callable", "type", "Literal", "ClassVar"}  # what stands in them is never hashed


class Names:
    """Classes of the repository by file, and what a name in a file stands for."""

    def __init__(self, sources: Mapping[str, Source]):
        self.classes = {
            path: {x.name: x for x in source.tree.body if isinstance(x, ast.ClassDef)}
            for path, source in sources.items()
        }
        self.imported = {path: dict(_imported(source.tree)) for path, source in sources.items()}

    def find(self, path: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """The file and class of `Name` or `module.Name` as written in a file."""
        if own := self.classes.get(path, {}).get(name):
            return path, own
        first, _, rest = name.partition(".")
        module = self.imported.get(path, {}).get(first, "")
        dotted = f"{module}.{rest}" if rest else module
        module, _, name = dotted.rpartition(".")
        for file in (f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")):
            if file in self.classes and (file, name) != (path, name):
                return self.find(file, name)
        return None

    def hashed(self, path: str, node: ast.expr) -> bool:
        """Whether values of an annotation can be hashed, as far as it tells."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            return self.hashed(path, node.left) and self.hashed(path, node.right)
        if isinstance(node, ast.Subscript):
            last = ast.unparse(node.value).rpartition(".")[2]
            if last in OPAQUE:
                return True
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return last not in UNHASHABLE and all(self.hashed(path, x) for x in parts)
        if not isinstance(node, ast.Name | ast.Attribute):
            return True
        name = ast.unparse(node)
        found = self.find(path, name)
        if found is None:
            return name.rpartition(".")[2] not in UNHASHABLE
        return not list(self.offences(*found))

    def offences(self, path: str, made: ast.ClassDef) -> Iterator[str]:
        """Why objects of a class have no hash: its fields that have none, or itself."""
        keywords = _dataclass(made)
        tuples = any(ast.unparse(x).endswith("NamedTuple") for x in made.bases)
        if (keywords is None and not tuples) or (keywords or {}).get("eq") is False:
            return
        if any(isinstance(x, ast.FunctionDef) and x.name == "__hash__" for x in made.body):
            return
        if keywords is not None and not keywords.get("frozen"):
            yield made.name
            return
        for x in made.body:
            if isinstance(x, ast.AnnAssign) and not self.hashed(path, x.annotation):
                yield ast.unparse(x.target)


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((x.asname or x.name, x.name) for x in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((x.asname or x.name, f"{node.module}.{x.name}") for x in node.names)


def _dataclass(made: ast.ClassDef) -> dict[str, object] | None:
    """The keywords of its dataclass decorator; None for another class."""
    for decorator in made.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(call).rpartition(".")[2] == "dataclass":
            given = decorator.keywords if isinstance(decorator, ast.Call) else []
            return {x.arg: getattr(x.value, "value", None) for x in given}
    return None


def faults(sources: Mapping[str, Source]) -> list[str]:
    """Frozen dataclasses that are compared by value and cannot be hashed."""
    names = Names(sources)
    return [
        f"{path}: {made.name} is frozen, but {', '.join(wrong)} cannot be hashed: say eq=False"
        for path, classes in names.classes.items()
        for made in classes.values()
        if (_dataclass(made) or {}).get("frozen") and (wrong := list(names.offences(path, made)))
    ]


def test_frozen_dataclasses_have_a_hash_or_no_equality() -> None:
    found = faults(import_graph.read())
    found = [x for x in found if x.startswith(ROOMS)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "field, wrong",
    [
        ("x: int", False),
        ("x: tuple[str, ...] | None = None", False),
        ("x: Callable[[dict], list]", False),
        ("x: dict[str, int]", True),
        ("x: 'tuple[np.ndarray, ...]'", True),
        ("x: other.Config", True),
        ("x: Renamed", True),
        ("x: other.Alone", False),
        ("x: other.Pair", True),
    ],
)
def test_a_field_is_followed_to_its_class(field: str, wrong: bool) -> None:
    texts = {
        "models/a.py": "from models import other\nfrom models.other import Config as Renamed\n"
        f"@dataclasses.dataclass(frozen=True)\nclass A:\n    {field}\n",
        "models/other.py": "@dataclasses.dataclass\nclass Config:\n    m: int\n"
        "@dataclasses.dataclass(frozen=True, eq=False)\nclass Alone:\n    m: dict\n"
        "class Pair(NamedTuple):\n    m: list[int]\n",
    }
    index = {"models.a": "models/a.py", "models.other": "models/other.py"}
    sources = {path: import_graph.parse(path, text, index) for path, text in texts.items()}
    assert bool(faults(sources)) == wrong
