"""BUILD: one target per Python file, with the edges that its imports are.

    python -m tests.house.build_file            # compares; lists what differs
    python -m tests.house.build_file --write    # writes BUILD anew

A `*_test.py` is a py_test, another file with a `__main__` block a py_binary, the rest py_library.
Names are paths without `.py`. Files that are not Python form one filegroup per directory below a
room; a file that names the directory has it as data.
"""

import argparse
import ast
import dataclasses
import pathlib
import sys
from collections.abc import Mapping

from tests.house import import_graph

_HEADER = '''"""One target per Python file; its edges are its imports.

Written by `make format` (tests/house/build_file.py), checked by tests/house/build_test.py. @pypi
names are those of requirements.txt and of the extras in pyproject.toml.
"""

load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

package(default_visibility = ["//visibility:public"])

filegroup(
    name = "tree",
    srcs = glob(
        ["**"],
        exclude = [
            ".venv*/**",
            "runs/**",
        ],
    ),
)
'''
_RUNNER = "tests/run_pytest.py"
_TREE = "tree"  # every tracked file, for the tests that read the repository itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One rule call in BUILD."""

    rule: str
    name: str
    srcs: tuple[str, ...]
    main: str = ""
    args: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    tags: tuple[str, ...] = ()
    deps: tuple[str, ...] = ()


def expected(root: pathlib.Path = import_graph.ROOT) -> list[Target]:
    """The targets that the sources ask for, in order."""
    sources = import_graph.read(root)
    groups = _groups(root)
    targets = [_target(source, sources, groups) for source in sources.values()]
    for group, paths in groups.items():
        targets.append(Target(rule="filegroup", name=f"{group}/data", srcs=paths))
    return sorted(targets, key=lambda target: target.name)


def parse(text: str) -> list[Target]:
    """Reads the targets of a BUILD file back, all but the whole-tree filegroup."""
    targets = []
    for statement in ast.parse(text).body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or ast.unparse(call.func) in ("load", "package"):
            continue
        fields = {word.arg: word.value for word in call.keywords if word.arg}
        if ast.unparse(fields["name"]) == repr(_TREE):
            continue
        values = {key: _frozen(ast.literal_eval(value)) for key, value in fields.items()}
        targets.append(Target(rule=ast.unparse(call.func), **values))
    return targets


def render(targets: list[Target]) -> str:
    """BUILD as text."""
    return _HEADER + "".join(f"\n{_render(target)}\n" for target in targets)


def differences(have: list[Target], want: list[Target]) -> list[str]:
    """What has to change in `have`, one line per target."""
    old = {target.name: target for target in have}
    new = {target.name: target for target in want}
    lines = [f"listed, but not there: {name}" for name in old.keys() - new.keys()]
    lines += [f"not listed: {name}" for name in new.keys() - old.keys()]
    for name in old.keys() & new.keys():
        for field in dataclasses.fields(Target):
            a, b = getattr(old[name], field.name), getattr(new[name], field.name)
            if a != b:
                lines.append(f"{name}: {field.name} is {a}, should be {b}")
    if len(old) != len(have):
        lines.append("a name is listed twice")
    return sorted(lines)


def _groups(root: pathlib.Path) -> dict[str, tuple[str, ...]]:
    """Files that are not Python, by the directory below a room that they are in."""
    groups: dict[str, list[str]] = {}
    for path in import_graph.files(root):
        if not path.endswith((".py", ".pyc")):
            groups.setdefault("/".join(path.split("/")[:-1][:2]), []).append(path)
    return {name: tuple(paths) for name, paths in groups.items()}


def _target(
    source: import_graph.Source,
    sources: Mapping[str, import_graph.Source],
    groups: Mapping[str, tuple[str, ...]],
) -> Target:
    path = source.path
    needs = set(source.local)
    named = _named(source.tree)
    data = [f":{group}/data" for group in groups if group.split("/")[-1] in named]
    external = set(source.external)
    env, tags = (), ()
    if source.is_test:
        needs |= {name for name in _conftests(path) if name in sources}
        external.add("pytest")
        if path.startswith("tests/house/"):
            data = [f":{_TREE}"]
        if path.startswith("tests/parity/"):
            env, tags = (("HETERO_KV_PARITY", "1"),), ("manual",)
    rule = "py_test" if source.is_test else "py_binary" if source.is_main else "py_library"
    return Target(
        rule=rule,
        name=path.removesuffix(".py"),
        srcs=(path, _RUNNER) if source.is_test else (path,),
        main={"py_test": _RUNNER, "py_binary": path, "py_library": ""}[rule],
        args=(path,) if source.is_test else (),
        data=tuple(sorted(data)),
        env=env,
        tags=tags,
        deps=(
            *sorted(":" + name.removesuffix(".py") for name in needs),
            *sorted("@pypi//" + name.lower().replace("-", "_") for name in external),
        ),
    )


def _conftests(path: str) -> list[str]:
    """The conftest.py of every directory above a test: pytest loads them without an import."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:depth]) + "/conftest.py" for depth in range(1, len(parts) + 1)]


def _named(tree: ast.Module) -> set[str]:
    """The components of every string in the code, docstrings aside, read as a path."""
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return {
        part
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
        for part in node.value.split("/")
    }


def _frozen(value: object) -> object:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def _render(target: Target) -> str:
    lines = [f"{target.rule}("]
    for field in dataclasses.fields(Target)[1:]:
        value = getattr(target, field.name)
        if isinstance(value, str) and value:
            lines.append(f'    {field.name} = "{value}",')
        elif field.name == "env" and value:
            pairs = ", ".join(f'"{key}": "{item}"' for key, item in value)
            lines.append(f"    env = {{{pairs}}},")
        elif value and len(value) == 1:
            lines.append(f'    {field.name} = ["{value[0]}"],')
        elif value:
            lines.append(f"    {field.name} = [")
            lines.extend(f'        "{item}",' for item in value)
            lines.append("    ],")
    return "\n".join([*lines, ")"])


def main() -> None:
    """Compares or writes."""
    parser = argparse.ArgumentParser(description="compare BUILD with the sources, or write it")
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    build = import_graph.ROOT / "BUILD"
    want = expected()
    lines = differences(parse(build.read_text()) if build.exists() else [], want)
    if write:
        build.write_text(render(want))
        print(f"BUILD: {len(want)} targets, {len(lines)} differences written")
    elif lines:
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
