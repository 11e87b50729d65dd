"""Folders of finished runs that never happened, for tests of what reads them.

run = make_run(tmp_path / "run", rows=60, evaluations=3)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minbert.evaluation.metrics import confusion_matrix, per_class_accuracy
from minbert.recipes import as_dict, parse_recipe, to_toml

FIVE = ("very negative", "negative", "neutral", "positive", "very positive")
TASKS: dict[str, dict[str, Any]] = {
    "sst": {"kind": "classification", "text": "sentence", "classes": FIVE},
    "quora": {"kind": "pair-classification", "text2": "sentence2", "classes": ("different", "duplicate")},
    "sts": {"kind": "pair-regression", "text2": "sentence2"},
}


def make_rows(task: Mapping[str, Any], count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Dev rows with answers that are right more often than not."""
    rows = []
    for place in range(count):
        row: dict[str, Any] = {"id": f"row-{place}", "text": f"The text of row {place}."}
        if "text2" in task:
            row["text2"] = f"The other text of row {place}."
        if "classes" in task:
            label = int(rng.integers(len(task["classes"])))
            logits = rng.normal(size=len(task["classes"]))
            logits[label] += 1.5
            odds = np.exp(logits) / np.exp(logits).sum()
            row |= {"label": float(label), "prediction": float(odds.argmax())}
            row["probabilities"] = [round(float(value), 6) for value in odds]
        else:
            score = float(rng.integers(26)) / 5
            row |= {"label": score, "prediction": float(np.clip(score + rng.normal(), 0, 5))}
        rows.append(row)
    return rows


def measured(value: float) -> dict[str, float | None]:
    """A metric as results.json has it, where nan is null."""
    ends = {"value": value, "low": value - 0.04, "high": value + 0.05}
    return {name: None if math.isnan(end) else end for name, end in ends.items()}


def summary(task: Mapping[str, Any], rows: list[dict[str, Any]], score: float) -> dict[str, Any]:
    names = ("accuracy", "roc-auc", "ece") if "classes" in task else ("pearson", "mse")
    content: dict[str, Any] = {"rows": len(rows), "metric": names[0]}
    content["metrics"] = {name: measured(score if name == names[0] else 0.111) for name in names}
    if "classes" in task:
        labels, found = ([row[key] for row in rows] for key in ("label", "prediction"))
        classes = len(task["classes"])
        shares = per_class_accuracy(labels, found, classes)
        content["classes"] = list(task["classes"])
        content["confusion"] = confusion_matrix(labels, found, classes).tolist()
        content["class_accuracy"] = [None if math.isnan(share) else share for share in shares]
    return content


def make_run(
    folder: Path,
    *,
    tasks: Mapping[str, Mapping[str, Any]] = TASKS,
    rows: int = 60,
    seed: int = 1,
    evaluations: int = 3,
    log_lines: int = 12,
    train_sample: bool = True,
    scores: Mapping[str, float] | None = None,
    change: Callable[[dict[str, Any]], None] | None = None,
    edit_rows: Callable[[str, list[dict[str, Any]]], None] | None = None,
    **recipe: Any,
) -> Path:
    """A finished run's folder. `change` gets results.json, `edit_rows` a task's predictions, before they are written."""
    rng = np.random.default_rng(seed)
    files = {"train": ["t.csv"], "dev": ["d.csv"]}
    resolved = parse_recipe({"name": "made-up", "seed": seed, "tasks": {k: {**files, **v} for k, v in tasks.items()}})
    resolved = replace(resolved, **recipe)
    (folder / "predictions").mkdir(parents=True)
    (folder / "recipe.toml").write_text(to_toml(resolved), encoding="utf-8")
    known = {task: 0.6 + 0.1 * place for place, task in enumerate(tasks)} | dict(scores or {})
    dev, train = {}, {}
    for name, task in tasks.items():
        found = make_rows(task, rows, rng)
        dev[name] = summary(task, found, known[name])
        train[name] = summary(task, found, known[name] + 0.2)
        if edit_rows is not None:
            edit_rows(name, found)
        lines = "".join(json.dumps(row) + "\n" for row in found)
        (folder / "predictions" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    records: list[dict[str, Any]] = [
        {"kind": "train", "step": 10 * line, "epoch": 1, "loss": dict.fromkeys(tasks, 2 / line), "lr": 1e-4 / line}
        for line in range(1, log_lines + 1)
    ]
    for number in range(1, evaluations + 1):
        now = {task: known[task] - 0.01 * (evaluations - number) for task in tasks}
        splits = {"dev": now} | ({"train": {task: value + 0.1 for task, value in now.items()}} if train_sample else {})
        kept = ["model"] if number == 1 or number == evaluations - 1 else []
        records.append({"kind": "evaluation", "step": 40 * number, "epoch": number, "scores": splits, "kept": kept})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    note = {
        "rows": 1234,
        "skipped": {"no label": 7},
        "truncated": {"texts": 3, "tokens": 456},
        "files": {"d.csv": "ab"},
    }
    results = {
        "name": resolved.name,
        "about": "A run that never happened.",
        "encoder": resolved.model.encoder,
        "seed": seed,
        "kinds": {name: task["kind"] for name, task in tasks.items()},
        "overall": {"2023": 0.7012, "2024": 0.7654},
        "dev": dev,
        "train": train if train_sample else {},
        "gap": {},
        "tuned_on_dev": {
            name: {"temperature": 1.37, "threshold": 0.456, "metrics": found["metrics"]}
            for name, found in dev.items()
            if "classes" in found
        },
        "steps": 120,
        "planned_steps": 160,
        "rows": 4321,
        "seconds": 150.0,
        "data": {split: dict.fromkeys(tasks, note) for split in ("train", "dev")},
        "environment": {"device": "cpu", "device_name": "abacus", "commit": "0123456789ab+"},
        "recipe": as_dict(resolved),
    }
    if change is not None:
        change(results)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder
