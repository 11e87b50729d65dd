"""What a run leaves behind, so that it can be read, compared and cited: results.json and the dev predictions."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minbert import __version__
from minbert.atomic import write_text
from minbert.data.raw import Examples
from minbert.errors import MinbertError, shown
from minbert.evaluation.bootstrap import PairedResult, paired_bootstrap
from minbert.evaluation.metrics import metrics_of
from minbert.machine import cpu_model
from minbert.tasks import Task

if TYPE_CHECKING:  # it needs torch, which reading results does not
    from minbert.evaluation.evaluate import Evaluation


@dataclass(frozen=True, eq=False)
class Predictions:
    """A run's answers on dev, as `compare` and `report` read them."""

    rows: list[dict[str, Any]]

    def column(self, name: str) -> NDArray[Any]:
        return np.array([row[name] for row in self.rows])


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_results(run: Path) -> dict[str, Any]:
    path = run / "results.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise MinbertError(f"{shown(path)}: no such file; expected the folder of a finished run") from None
    except ValueError as error:
        raise MinbertError(f"{shown(path)}: not JSON ({error})") from None


def write_predictions(run: Path, task: Task, examples: Examples, evaluation: Evaluation) -> None:
    """predictions/TASK.jsonl: each dev row with its texts, its label and what the model said.

    A masked task's label is how many tokens were to be guessed, its prediction how many were right.
    """
    lines = []
    probabilities = evaluation.answers.probabilities
    for number in range(len(examples)):
        row: dict[str, Any] = {"id": examples.ids[number], "text": examples.texts[number]}
        if examples.pairs is not None:
            row["text2"] = examples.pairs[number]
        row["label"] = float(evaluation.labels[number])
        row["prediction"] = float(evaluation.answers.predictions[number])
        if probabilities is not None:
            row["probabilities"] = [round(float(value), 6) for value in probabilities[number]]
        if evaluation.answers.losses is not None:
            row["loss"] = round(float(evaluation.answers.losses[number]), 6)
        lines.append(json.dumps(row, ensure_ascii=False))
    folder = run / "predictions"
    folder.mkdir(exist_ok=True)
    write_text(folder / f"{task.name}.jsonl", "\n".join(lines) + "\n")


def read_predictions(run: Path, task: str) -> Predictions:
    path = run / "predictions" / f"{task}.jsonl"
    try:
        # Not splitlines: a text may hold one of the other characters that it takes for the end of a line
        return Predictions([json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line])
    except (OSError, ValueError) as error:
        raise MinbertError(
            f"{shown(path)}: cannot be read ({error}); expected the predictions of a finished run"
        ) from None


def compare_runs(one: Path, other: Path, *, rng: np.random.Generator, samples: int = 10_000) -> dict[str, PairedResult]:
    """The paired bootstrap of each task that both runs have: is the second run different from the first?"""
    first, second = read_results(one), read_results(other)
    shared = [name for name in first["dev"] if name in second["dev"]]
    if not shared:
        raise MinbertError(f"{shown(one)} and {shown(other)} have no task in common")
    found = {}
    for name in shared:
        a, b = read_predictions(one, name), read_predictions(other, name)
        if a.column("id").tolist() != b.column("id").tolist() or not np.array_equal(
            a.column("label"), b.column("label")
        ):
            raise MinbertError(f"{name}: the two runs were scored on different dev rows; expected the same")
        metric = metrics_of(first["kinds"][name])[first["dev"][name]["metric"]]
        column = "probabilities" if metric.reads == "probabilities" else "prediction"
        found[name] = paired_bootstrap(
            metric, a.column("label"), a.column(column), b.column(column), rng=rng, samples=samples
        )
    return found


def environment(device: str) -> dict[str, Any]:
    """Where a run happened: versions, device, commit."""
    import torch

    name = torch.cuda.get_device_name() if device.startswith("cuda") else cpu_model()[0]
    return {
        "minbert": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "device_name": name,
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The commit of the checkout this code runs from, "+" when it was changed since; None outside a checkout.

    MINBERT_COMMIT says it where the code was copied without its history.
    """
    if said := os.environ.get("MINBERT_COMMIT"):
        return said
    folder = Path(__file__).parent.parent  # the package

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "--no-optional-locks", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", str(folder)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def gap(train: float | None, dev: float | None) -> float | None:
    """How much better a model is on what it has seen."""
    return None if train is None or dev is None or math.isnan(train) or math.isnan(dev) else train - dev
