"""The repository's Python files and what each imports, read without running them."""

import ast
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterator, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = ("hetero_kv", "models", "experiments", "configs", "tests")

# Import name of everything used from outside, and the distribution that brings it. A name that is
# neither here nor in the standard library is reported as unknown.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "flax": "flax",
    "hypothesis": "hypothesis",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "matplotlib": "matplotlib",
    "ml_collections": "ml_collections",
    "ml_dtypes": "ml_dtypes",
    "nbclient": "nbclient",
    "nbformat": "nbformat",
    "numpy": "numpy",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "packaging": "packaging",
    "pytest": "pytest",
    "rich": "rich",
    "safetensors": "safetensors",
    "tensorboardX": "tensorboardX",
    "torch": "torch",
    "transformers": "transformers",
    "xxhash": "xxhash",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One Python file."""

    path: str  # relative to the root, with slashes
    tree: ast.Module
    local: frozenset[str]  # paths of the repository's files that it imports
    external: frozenset[str]  # distributions that it imports from
    modules: frozenset[str]  # dotted names of all that it imports, as written
    unknown: tuple[str, ...]  # imports that lead nowhere, each with what to do

    @property
    def is_test(self) -> bool:
        """Whether pytest collects it."""
        return self.path.startswith("tests/") and self.path.endswith("_test.py")

    @property
    def is_main(self) -> bool:
        """Whether it can be run as a program."""
        return any(
            isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
            for node in self.tree.body
        )


def files(root: pathlib.Path = ROOT) -> list[str]:
    """All files of the rooms, relative to the root, in order; caches and hidden files left out."""
    found = []
    for room in ROOMS:
        for path in (root / room).rglob("*"):
            parts = path.relative_to(root).parts
            if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in parts):
                found.append("/".join(parts))
    return sorted(found)


def read(root: pathlib.Path = ROOT) -> Mapping[str, Source]:
    """Parses every Python file of the rooms; those of the repository once in a process."""
    return _repository() if root == ROOT else _read(root)


@functools.cache
def _repository() -> Mapping[str, Source]:
    return _read(ROOT)


def _read(root: pathlib.Path) -> Mapping[str, Source]:
    paths = [path for path in files(root) if path.endswith(".py")]
    index = {_module(path): path for path in paths}
    return {path: parse(path, (root / path).read_text(), index) for path in paths}


def cycle(sources: Mapping[str, Source]) -> list[str]:
    """Files that import each other in a circle, or an empty list."""
    done: set[str] = set()

    def visit(path: str, trail: list[str]) -> list[str]:
        if path in trail:
            return [*trail[trail.index(path) :], path]
        if path in done:
            return []
        for target in sorted(sources[path].local):
            if found := visit(target, [*trail, path]):
                return found
        done.add(path)
        return []

    return next((found for path in sources if (found := visit(path, []))), [])


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def parse(path: str, text: str, index: Mapping[str, str]) -> Source:
    """Parses one file; `index` gives the path of each module of the repository."""
    tree = ast.parse(text, path)
    local, external, modules, unknown = set(), set(), set(), []
    for package in _chosen(tree):
        local |= {target for name, target in index.items() if name.startswith(package)}
    for module, name in _imports(tree, path):
        modules.add(f"{module}.{name}" if name else module)
        top = module.partition(".")[0]
        if top in ROOMS:
            target = index.get(f"{module}.{name}") or index.get(module)
            if target is None:
                unknown.append(f"{path} imports {module}, which is not in the repository")
            else:
                local.add(target)
        elif top in DISTRIBUTIONS:
            external.add(DISTRIBUTIONS[top])
        elif top not in sys.stdlib_module_names:
            unknown.append(f"{path} imports {top}: add it to DISTRIBUTIONS and to requirements.txt")
    return Source(
        path=path,
        tree=tree,
        local=frozenset(local - {path}),
        external=frozenset(external),
        modules=frozenset(modules),
        unknown=tuple(unknown),
    )


def _chosen(tree: ast.Module) -> Iterator[str]:
    """Yields "package." of every `import_module(f"package.{name}")`: all its modules are needed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else None
            if isinstance(first, ast.Constant):
                yield str(first.value)


def _imports(tree: ast.Module, path: str) -> Iterator[tuple[str, str]]:
    """Yields (module, name) of every import, also in functions; no name for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = path.split("/")[: -node.level]
                module = ".".join([*package, *([module] if module else [])])
            for alias in node.names:
                yield module, alias.name
