"""Runs of a few steps: recipes over the cut-down sample, ways to stop them, and what a run left behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from minbert.config import Recipe
from minbert.data.plan import Plan
from minbert.experiment import new_model
from minbert.preparing import prepare
from minbert.recipes import parse_recipe
from minbert.training.checkpoint import list_checkpoints
from minbert.training.metrics_log import read_metrics
from minbert.training.trainer import Silent, Trainer

FILES = {"sst": "sentiment", "quora": "paraphrase", "sts": "similarity"}
"""The course's tasks and the sample's files for them."""


def small_recipe(
    encoder: Path, *names: str, tasks: Mapping[str, Mapping[str, Any]] | None = None, **tables: Any
) -> Recipe:
    """The named tasks (all three without names) on `small_data`: 3 batches of each, 2 epochs, 18 steps for all."""
    rows = {
        name: {"train": f"{FILES[name]}-train.tsv", "dev": f"{FILES[name]}-dev.tsv", "test": []}
        | dict((tasks or {}).get(name, {}))
        for name in names or FILES
    }
    defaults: dict[str, dict[str, Any]] = {
        "model": {"encoder": str(encoder)},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
        "training": {"epochs": 2, "batch_size": 8, "log_every": 2},
    }
    merged = {key: {**table, **tables.pop(key, {})} for key, table in defaults.items()}
    return parse_recipe({"name": "small", "tasks": rows, **merged, **tables})


def constant_scores(recipe: Recipe) -> Callable[[Any], dict[str, dict[str, float]]]:
    return lambda _: {"dev": {task.name: 0.5 for task in recipe.tasks}}


def small_trainer(recipe: Recipe, run: Path, data: Path, *, device: str = "cpu", **options: Any) -> Trainer:
    """A trainer without the rest of an experiment: nothing is scored or kept unless the options say so."""
    run.mkdir(parents=True, exist_ok=True)
    tokenizer, model, _ = new_model(recipe, torch.device(device))
    inputs = prepare(recipe, tokenizer, data).inputs["train"]
    options = {"evaluate": constant_scores(recipe), "save": lambda _model, _name: None, **options}
    return Trainer(recipe, model, inputs, run=run, **options)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class Stopped(Exception):  # noqa: N818 - a power cut, not an error
    pass


class Listener(Silent):
    """Remembers what it is told; stops the run at a step, or at the evaluation of a step, of a stage or of any part, or
    where a part begins.
    """

    def __init__(self, *, at_step: int = 0, at_evaluation: int = 0, at_part: str = "", part: str = "") -> None:
        self.at_step, self.at_evaluation, self.at_part = at_step, at_evaluation, at_part
        self.part = part
        self.parts: list[tuple[str, int, int]] = []
        self.plan: Plan | None = None
        self.steps: list[int] = []
        self.evaluations: list[Mapping[str, Any]] = []
        self.warnings: list[str] = []

    def entering(self, name: str, number: int, parts: int) -> None:
        self.parts.append((name, number, parts))
        if name == self.at_part:
            self.stop()

    def planned(self, plan: Plan) -> None:
        self.plan = plan

    def stop(self) -> None:
        raise Stopped

    def here(self) -> bool:
        return not self.part or (bool(self.parts) and self.parts[-1][0] == self.part)

    def stepped(self, step: int, _record: Mapping[str, Any] | None) -> None:
        self.steps.append(step)
        if step == self.at_step and self.here():
            self.stop()

    def evaluated(self, record: Mapping[str, Any]) -> None:
        self.evaluations.append(record)
        if record["step"] == self.at_evaluation and self.here():
            self.stop()

    def warn(self, message: str) -> None:
        self.warnings.append(message)


class CtrlC(Listener):
    """Presses Ctrl-C there. For tests that use `ctrl_c_is_heard`."""

    def stop(self) -> None:
        signal.raise_signal(signal.SIGINT)


def left_behind(run: Path) -> dict[str, Any]:
    """Everything in a run's folder, without the seconds it took and TensorBoard's own files, which are named after the
    time: two runs that did the same are equal here.
    """
    paths = sorted(path for path in run.rglob("*") if "tensorboard" not in path.relative_to(run).parts)
    found: dict[str, Any] = {"names": [str(path.relative_to(run)) for path in paths]}
    for path in paths:
        name = str(path.relative_to(run))
        if path.name == "metrics.jsonl":
            found[name] = [without_seconds(record) for record in read_metrics(path)]
        elif path.suffix == ".json":
            found[name] = without_seconds(json.loads(path.read_text(encoding="utf-8")))
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def without_seconds(record: Any) -> Any:
    if isinstance(record, dict):
        return {key: without_seconds(value) for key, value in record.items() if key not in ("seconds", "commit")}
    return record


def unlike(one: Path, other: Path) -> list[str]:
    """The names of what differs between two runs' folders."""
    left, right = left_behind(one), left_behind(other)
    return [name for name in sorted({*left, *right}) if left.get(name) != right.get(name)]


def last_checkpoint(run: Path) -> Path:
    return list_checkpoints(run / "checkpoints")[-1]
