"""When is a checkpoint the best so far, and when is it time to stop?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minbert.config import TrainingConfig

MODEL = "model"


@dataclass
class Selection:
    """Told the dev score of each task after every evaluation; says in which folders of the run to keep the model."""

    config: TrainingConfig
    best: dict[str, float] = field(default_factory=dict)
    """The best so far: the aggregate, under "*", and each task's own."""
    stale: int = 0
    """Evaluations since the aggregate last rose."""

    def aggregate(self, scores: Mapping[str, float]) -> float:
        """The number that early stopping watches, and that most rules choose by."""
        known = {task: 0.0 if math.isnan(score) else score for task, score in scores.items()}
        if self.config.best == "task":
            return known[self.config.best_task]
        weights = dict.fromkeys(known, 1.0)
        if self.config.best == "weighted-mean":
            weights |= self.config.best_weights
        return sum(weights[task] * score for task, score in known.items()) / sum(weights[task] for task in known)

    def update(self, scores: Mapping[str, float]) -> list[str]:
        """Folders to save this model in: "model", and with the rule per-task "models/TASK" for each task that rose."""
        aggregate = self.aggregate(scores)
        risen = [task for task, score in scores.items() if score > self.best.get(task, -math.inf)]
        better = aggregate > self.best.get("*", -math.inf)
        self.stale = 0 if better else self.stale + 1
        self.best |= {task: scores[task] for task in risen}
        if better:
            self.best["*"] = aggregate
        keep = {"any-improves": bool(risen), "last": True}.get(self.config.best, better)
        own = [f"models/{task}" for task in risen] if self.config.best == "per-task" else []
        return ([MODEL] if keep else []) + own

    @property
    def exhausted(self) -> bool:
        return 0 < self.config.patience <= self.stale

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "stale": self.stale}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.stale = dict(state["best"]), int(state["stale"])
