"""The requests of the main job: popular documents, and a question of its own for each request."""

import dataclasses

import numpy as np

from experiments.reuse_config import Scenario
from experiments.tasks import Recall, Text
from experiments.train_config import TrainConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """prompt i32[n]: document, then question. truth i32[q]: the answer to each question token,
    or empty where only the cold run can tell."""

    document: int
    prompt: np.ndarray
    truth: np.ndarray


def draw(scenario: Scenario, trained: TrainConfig, seed: int) -> list[Request]:
    """All requests of a scenario, a pure function of its fields and the seed."""
    rng = np.random.default_rng([7, seed])
    weights = 1.0 / np.arange(1, scenario.documents + 1) ** scenario.popularity
    chosen = rng.choice(scenario.documents, scenario.requests, p=weights / weights.sum())
    make = {"recall": _recall, "text": _text}[scenario.kind]
    return make(scenario, trained, rng, chosen)


def _recall(
    scenario: Scenario, trained: TrainConfig, rng: np.random.Generator, chosen: np.ndarray
) -> list[Request]:
    task = trained.task
    if not isinstance(task, Recall):
        raise ValueError(f"{scenario.checkpoint} was not trained on recall but on {task}")
    documents = [task.document(rng, scenario.document_tokens) for _ in range(scenario.documents)]
    requests = []
    for index in chosen.tolist():
        queries, answers = task.questions(rng, documents[index], scenario.question_tokens)
        prompt = np.concatenate([documents[index].tokens, queries]).astype(np.int32)
        requests.append(Request(index, prompt, answers))
    return requests


def _text(
    scenario: Scenario, trained: TrainConfig, rng: np.random.Generator, chosen: np.ndarray
) -> list[Request]:
    """Documents are held-out source files; a question quotes a line of the file to be continued."""
    task = trained.task
    if not isinstance(task, Text):
        raise ValueError(f"{scenario.checkpoint} was not trained on text but on {task}")
    files = [tokens for _, tokens in task.documents("test", scenario.document_tokens)]
    files += [tokens for _, tokens in task.documents("val", scenario.document_tokens)]
    if len(files) < scenario.documents:
        raise ValueError(f"{scenario.documents=} but only {len(files)} files are long enough")
    picked = rng.choice(len(files), scenario.documents, replace=False)
    requests = []
    for index in chosen.tolist():
        document = files[picked[index]]
        start = rng.integers(0, len(document) - scenario.question_tokens)
        question = document[start : start + scenario.question_tokens].copy()
        question[0] = ord("\n")
        prompt = np.concatenate([document, question]).astype(np.int32)
        requests.append(Request(index, prompt, np.zeros(0, np.int32)))
    return requests
