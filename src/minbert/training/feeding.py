"""From the sampler's steps to batches, and through `step.py`: as they come, task by task, in chunks, or as CUDA graphs.

feeder = make_feeder(step, data, recipe.training)
for batch in feeder.batches(steps):
    feeder.run(batch, update=True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from minbert.config import TrainingConfig
from minbert.data.inputs import Batch, Inputs, collate
from minbert.data.streams import Step
from minbert.model.multitask import ready
from minbert.model.runner import FusedRunner
from minbert.training.grad_cache import split_step
from minbert.training.gradients import Surgery, add_gradients
from minbert.training.graphs import SLOTS, Graphs, Staged, Staging, ahead
from minbert.training.step import TrainStep
from minbert.training.task_graphs import TaskGraphs

AnyBatch = TypeVar("AnyBatch", Batch, Staged)


def make_feeder(
    work: TrainStep, data: Mapping[str, Inputs], training: TrainingConfig
) -> OneByOne | TaskByTask | InChunks | Recorded | RecordedApart:
    """Graphs, where the kernels are ours, each step is an update, and the rule can be recorded or its passes can."""
    fused = isinstance(work.model.runner, FusedRunner) and training.accumulate == 1
    if isinstance(work.rule, Surgery):
        return RecordedApart(work, data, work.rule) if fused else TaskByTask(work, data)
    if training.cache_rows:
        return InChunks(work, data, training.cache_rows)
    return (Recorded if fused and work.rule is add_gradients else OneByOne)(work, data)


class OneByOne:
    """Batches made and run when their turn comes."""

    def __init__(self, work: TrainStep, data: Mapping[str, Inputs]) -> None:
        self.work, self.data = work, data

    def batches(self, steps: Iterable[Step]) -> Iterator[Batch]:
        return (collate(step, self.data) for step in steps)

    def run(self, batch: Batch, *, update: bool) -> None:
        self.work.gradient(ready(batch, self.work.model.encoder))
        if update:
            self.work.update()

    def clear(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Apart(Generic[AnyBatch]):
    """A step as one batch for each of its tasks."""

    batches: tuple[AnyBatch, ...]

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)


class TaskByTask:
    """A step's tasks one after the other, for rules that look at each task's gradient by itself."""

    def __init__(self, work: TrainStep, data: Mapping[str, Inputs]) -> None:
        self.work, self.data = work, data

    def batches(self, steps: Iterable[Step]) -> Iterator[Apart[Batch]]:
        return (Apart(tuple(collate((part,), self.data) for part in step)) for step in steps)

    def run(self, batch: Apart[Batch], *, update: bool) -> None:
        self.work.gradient_apart(batch.batches)
        if update:
            self.work.update()

    def clear(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Chunked:
    """A step whose large contrastive batches are in chunks."""

    whole: Batch | None
    """What is run as it is."""
    chunks: tuple[tuple[Batch, ...], ...]

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in chain([self.whole] if self.whole else [], *self.chunks))


class InChunks:
    """Contrastive batches of more than so many rows in chunks of those: `grad_cache.py`. Everything else at once."""

    def __init__(self, work: TrainStep, data: Mapping[str, Inputs], rows: int) -> None:
        self.work, self.data, self.rows = work, data, rows

    def batches(self, steps: Iterable[Step]) -> Iterator[Chunked]:
        tasks = {name: inputs.task for name, inputs in self.data.items()}
        for step in steps:
            whole, large = split_step(step, tasks, self.rows)
            chunks = tuple(tuple(collate((part,), self.data) for part in parts) for parts in large)
            yield Chunked(collate(whole, self.data) if whole else None, chunks)

    def run(self, batch: Chunked, *, update: bool) -> None:
        tasks = len(batch.whole.parts if batch.whole else ()) + len(batch.chunks)
        if batch.whole:
            self.work.gradient(ready(batch.whole, self.work.model.encoder), tasks)
        for chunks in batch.chunks:
            self.work.gradient_cached(chunks, tasks)
        if update:
            self.work.update()

    def clear(self) -> None: ...


class Recorded:
    """Batches made ahead on another thread, and run as CUDA graphs."""

    def __init__(self, work: TrainStep, data: Mapping[str, Inputs]) -> None:
        self.work, self.data, self.graphs = work, data, Graphs(work)
        self.staging = Staging(work.model.encoder.config, len(work.optimizer.param_groups))

    def batches(self, steps: Iterable[Step]) -> Iterator[Staged]:
        return ahead(steps, lambda step: self.staging.stage(collate(step, self.data)), SLOTS - 3)

    def run(self, batch: Staged, *, update: bool) -> None:  # noqa: ARG002 - graphs are for one batch an update
        self.graphs.run(batch, [group["lr"] for group in self.work.optimizer.param_groups])

    def clear(self) -> None:
        self.graphs.clear()


class RecordedApart:
    """The same for rules that look at each task's gradient by itself."""

    def __init__(self, work: TrainStep, data: Mapping[str, Inputs], rule: Surgery) -> None:
        self.work, self.data, self.graphs = work, data, TaskGraphs(work, rule)
        self.staging = Staging(work.model.encoder.config, len(work.optimizer.param_groups), len(data))

    def batches(self, steps: Iterable[Step]) -> Iterator[Apart[Staged]]:
        return ahead(steps, self._stage, SLOTS - 3)

    def _stage(self, step: Step) -> Apart[Staged]:
        return Apart(tuple(self.staging.stage(collate((part,), self.data)) for part in step))

    def run(self, batch: Apart[Staged], *, update: bool) -> None:  # noqa: ARG002 - as of Recorded
        self.graphs.run(batch.batches, [group["lr"] for group in self.work.optimizer.param_groups])

    def clear(self) -> None:
        self.graphs.clear()
