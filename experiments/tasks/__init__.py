"""Tasks by name. A task is one file; adding it to `TASKS` is all the registration there is."""

from experiments.tasks.induction import Induction
from experiments.tasks.needle import Needle
from experiments.tasks.recall import Recall
from experiments.tasks.task import Batch, Task
from experiments.tasks.text import Text

TASKS: dict[str, type[Task]] = {
    "induction": Induction,
    "needle": Needle,
    "recall": Recall,
    "text": Text,
}

__all__ = ["TASKS", "Batch", "Induction", "Needle", "Recall", "Task", "Text", "name_of"]


def name_of(task: Task) -> str:
    """The registered name of a task object."""
    for name, kind in TASKS.items():
        if type(task) is kind:
            return name
    raise ValueError(f"{type(task).__name__} is not registered; known tasks: {sorted(TASKS)}")
