"""Score a model folder, or an export, on dev: what `minbert evaluate` does. An export needs no torch.

found = evaluate_model("runs/sample/model")
found["sst"].metrics["accuracy"].value
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minbert.config import Recipe, data_folder
from minbert.data.cache import TokenCache
from minbert.delivery.backends import Precision
from minbert.delivery.exported import OnnxModel, is_export
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError, require
from minbert.evaluation.evaluate import Evaluation, evaluate_task, labels_of
from minbert.machine import set_threads
from minbert.preparing import Prepared, Preparing, Unwatched, prepare
from minbert.tasks import Task


def evaluate_model(
    folder: str | Path,
    recipe: Recipe | None = None,
    *,
    data: str | Path | None = None,
    device: str = "auto",
    precision: Precision = "fp32",
    samples: int = 1000,
    watcher: Preparing | None = None,
) -> dict[str, Evaluation]:
    """Score a model folder on dev: of its own tasks, or of those a recipe describes (other files, same heads)."""
    if not is_export(Path(folder)):
        require("torch", "train", "evaluating a model that is not exported to onnx")
        set_threads()
    predictor = Predictor.load(folder, device=device, precision=precision)
    rng = np.random.default_rng(Recipe.seed)
    return {
        name: evaluate_task(
            predictor.tasks[name],
            labels,
            outputs,
            rng=rng,
            decision=predictor.manifest.decisions.get(name),
            samples=samples,
        )
        for name, (labels, outputs) in dev_outputs(predictor, recipe, data=data, watcher=watcher).items()
    }


def dev_outputs(
    predictor: Predictor,
    recipe: Recipe | None = None,
    *,
    data: str | Path | None = None,
    watcher: Preparing | None = None,
) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float32]]]:
    """The labels of each task's dev rows, and what the model says of them; for the recipe see `evaluate_model`."""
    prepared = prepare_dev(predictor, recipe, data=data, watcher=watcher)
    return {
        name: (labels_of(inputs), predictor.outputs_of(inputs, prepared.examples["dev"][name]))
        for name, inputs in prepared.inputs["dev"].items()
    }


def prepare_dev(
    predictor: Predictor,
    recipe: Recipe | None = None,
    *,
    data: str | Path | None = None,
    watcher: Preparing | None = None,
) -> Prepared:
    """The dev rows of the model's tasks, read and tokenized."""
    watcher = watcher or Unwatched()
    known, manifest = predictor.tasks, predictor.manifest
    tasks = [_with_files_of(known, task) for task in recipe.tasks] if recipe else _scored(predictor, watcher)
    base = Recipe(tuple(tasks), data=recipe.data if recipe else manifest.data, model=manifest.model)
    cache = TokenCache.from_environment(watcher.warn)
    return prepare(base, predictor.tokenizer, data_folder(base, data), ("dev",), cache=cache, watcher=watcher)


def _scored(predictor: Predictor, watcher: Preparing) -> list[Task]:
    """A model's own tasks; of an export those that are judged by answers, which is all that it gives."""
    tasks = list(predictor.manifest.tasks)
    if not isinstance(predictor.backend, OnnxModel):
        return tasks
    for task in tasks:
        if not task.has_label:
            watcher.warn(f"{task.name} is a {task.kind} task, which an export cannot be scored on; expected the model")
    return [task for task in tasks if task.has_label]


def _with_files_of(known: Mapping[str, Task], other: Task) -> Task:
    """The model's own task, reading the files and columns that another row of its name gives."""
    if other.name not in known:
        raise MinbertError(f'the model has no task "{other.name}"; it has: {", ".join(known)}')
    read = ("dev", "id", "text", "text2", "text3", "label", "normalise")
    return replace(known[other.name], **{name: getattr(other, name) for name in read})
