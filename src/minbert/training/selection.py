"""When is a checkpoint the best so far, and when is it time to stop?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minbert.config import TrainingConfig
from minbert.tasks import Task, counted

MODEL = "model"
SNAPSHOTS = "models"


@dataclass
class Selection:
    """Told the dev score of each task after every evaluation; says in which folders of the run to keep the model."""

    config: TrainingConfig
    tasks: Mapping[str, Task]
    best: dict[str, float] = field(default_factory=dict)
    """What is to be beaten: the best aggregate so far, under "*", and a score of each task: its best so far or, with the
    rule any-improves, that of the model that is kept."""
    stale: int = 0
    """Evaluations since the aggregate last rose."""
    snapshots: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The evaluations whose models are kept beside the chosen one, by step, the best first: aggregate and scores."""

    def aggregate(self, scores: Mapping[str, float]) -> float:
        """The number that early stopping watches, and that most rules choose by."""
        known = {task: 0.0 if math.isnan(score) else score for task, score in scores.items()}
        if self.config.best == "task":
            return known[self.config.best_task]
        weights = dict.fromkeys(counted(known, self.tasks), 1.0)
        if self.config.best == "weighted-mean":
            weights |= {task: weight for task, weight in self.config.best_weights.items() if task in known}
        return sum(weight * known[task] for task, weight in weights.items()) / sum(weights.values())

    def update(self, scores: Mapping[str, float]) -> list[str]:
        """Folders to save this model in: "model", and with the rule per-task "models/TASK" for each task that rose."""
        aggregate = self.aggregate(scores)
        risen = [task for task, score in scores.items() if score > self.best.get(task, -math.inf)]
        better = aggregate > self.best.get("*", -math.inf)
        self.stale = 0 if better else self.stale + 1
        first = "*" not in self.best  # kept in any case, also where no task has a score that can be computed
        keep = {"any-improves": bool(risen) or first, "last": True}.get(self.config.best, better)
        if self.config.best == "any-improves" and keep:
            # "Improvement in any single task from the previous state of the model" (Vinjapuri & Vasireddy): all
            # scores to beat are those of one model, the one that this replaces, and not each task's best ever.
            known = {task: score for task, score in scores.items() if not math.isnan(score)}
            self.best = {"*": max(aggregate, self.best.get("*", aggregate)), **known}
        else:
            self.best |= {task: scores[task] for task in risen}
        if better:
            self.best["*"] = aggregate
        own = [f"models/{task}" for task in risen] if self.config.best == "per-task" else []
        return ([MODEL] if keep else []) + own

    def snapshot(self, step: int, scores: Mapping[str, float]) -> str | None:
        """The folder to keep this model in too, if it is one of the best; another then falls out of `snapshots`."""
        entry = {
            "aggregate": self.aggregate(scores),
            "scores": {task: None if math.isnan(score) else score for task, score in scores.items()},
        }
        found = {**self.snapshots, step: entry}
        ranked = sorted(found, key=lambda number: (-found[number]["aggregate"], number))[: self.config.snapshots]
        if step not in ranked:
            return None
        self.snapshots = {number: found[number] for number in ranked}
        return snapshot_folder(step)

    @property
    def exhausted(self) -> bool:
        return 0 < self.config.patience <= self.stale

    def state(self) -> dict[str, Any]:
        kept = {str(step): entry for step, entry in self.snapshots.items()}
        return {"best": self.best, "stale": self.stale, "snapshots": kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.stale = dict(state["best"]), int(state["stale"])
        self.snapshots = {int(step): dict(entry) for step, entry in state.get("snapshots", {}).items()}


def snapshot_folder(step: int) -> str:
    return f"{SNAPSHOTS}/step-{step:08d}"
