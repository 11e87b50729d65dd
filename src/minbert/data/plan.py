"""What a run will do, counted before it starts.

plan(sampler).tasks["sst"].passes      # how often the run goes over SST
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from minbert.data.samplers import Sampler, Thinned


@dataclass(frozen=True)
class TaskPlan:
    """What a run does with one task."""

    size: int
    """Rows of the dataset."""
    batches: int
    rows: int
    """All that are trained on, repetitions counted."""
    share: float
    """Part of the steps that the task is in."""

    @property
    def passes(self) -> float:
        """How often the run goes over the dataset."""
        return self.rows / self.size


@dataclass(frozen=True)
class Plan:
    """What a run will do, counted before it starts."""

    epochs: tuple[int, ...]
    """Steps of each epoch."""
    tasks: dict[str, TaskPlan]
    whole: int
    """Steps that it would have without `max_steps`."""

    @property
    def steps(self) -> int:
        return sum(self.epochs)

    def progress(self, step: int, parts: int = 1) -> float:
        """How far the run is at the middle of a step, the first being 1: 0 to 1. Of a run in several parts, with as many
        epochs each: how far that part is."""
        size, before = len(self.epochs) // parts, 0
        for part in range(parts):
            steps = sum(self.epochs[part * size : (part + 1) * size])
            if step <= before + steps:
                return (step - before - 0.5) / steps
            before += steps
        raise ValueError(f"step {step} of {before}")


def plan(sampler: Sampler) -> Plan:
    """Go through all steps once, keeping only the counts."""
    epochs: list[int] = []
    batches: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for epoch in sampler.epochs():
        epochs.append(0)
        for step in epoch:
            epochs[-1] += 1
            for part in step:
                batches[part.task] += 1
                rows[part.task] += len(part.rows)
    tasks = {
        task: TaskPlan(len(stream.lengths), batches[task], rows[task], batches[task] / sum(epochs))
        for task, stream in sampler.streams.items()
    }
    return Plan(tuple(epochs), tasks, sampler.steps if isinstance(sampler, Thinned) else sum(epochs))
