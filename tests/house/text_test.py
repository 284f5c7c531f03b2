"""What no file may say, and how long one may be."""

import ast
import pathlib
import re
from collections.abc import Iterator

from tests.house import import_graph

MAX_LINES = 500
_MACHINE_PATH = re.compile(r"(?<![\w./\-])/(?:work|root|home|Users)\b")
_REGISTRY = re.compile(r"pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)", re.IGNORECASE)
_SKIPPED = re.compile(r"\.(?!ci$|gitignore$)|__pycache__$|runs$|build$|.*\.egg-info$")


def texts() -> Iterator[tuple[str, str]]:
    """Yields (path, text) of every text file that belongs to the repository."""

    def walk(directory: pathlib.Path) -> Iterator[pathlib.Path]:
        for path in sorted(directory.iterdir()):
            if _SKIPPED.match(path.name):
                continue
            if path.is_dir():
                yield from walk(path)
            elif path.is_file():
                yield path

    for path in walk(import_graph.ROOT):
        try:
            yield path.relative_to(import_graph.ROOT).as_posix(), path.read_text()
        except UnicodeDecodeError:  # not text
            continue


def test_no_paths_of_a_machine_and_no_registry_hosts() -> None:
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if _MACHINE_PATH.search(line) or _REGISTRY.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_patterns_find_what_they_should() -> None:
    slash = "/"
    for text in (f"open('{slash}root/x')", f"see {slash}work", f"{slash}home/a"):
        assert _MACHINE_PATH.search(text)
    for text in ("https://example.com/home", "a/work/b", "tests/root", "/workers"):
        assert not _MACHINE_PATH.search(text)


def test_files_are_short_and_say_what_they_are() -> None:
    for source in import_graph.read().values():
        text = (import_graph.ROOT / source.path).read_text()
        assert len(text.splitlines()) <= MAX_LINES, f"{source.path}: over {MAX_LINES} lines"
        assert not text.strip() or ast.get_docstring(source.tree), f"{source.path}: no docstring"
