"""Every notebook runs from top to bottom on the CPU, and is committed without outputs."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(DIRECTORY.glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_without_outputs(path: pathlib.Path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and not cell.get("execution_count"), cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    # Its kernel is a process of its own, where compiling takes most of the time.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(DIRECTORY)}})
    client.execute()  # raises on the first cell that fails; the notebooks assert what they claim
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert pictures
