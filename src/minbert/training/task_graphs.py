"""Steps with gradient surgery as CUDA graphs: one for each task's pass, one for the update; the algebra between runs by itself.

    graphs = TaskGraphs(step, rule)
    graphs.run([staging.stage(batch) for batch in batches], rates)      # one batch for each task

A pass leaves its gradient in memory that belongs to no graph: of the shared parameters in its row of the rule, of all
others (heads, learned loss weights) in buffers that every pass of the step adds to. So graphs can share their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from minbert.training import graphs
from minbert.training.gradients import Surgery
from minbert.training.graphs import Layout, Recorded, Staged, record
from minbert.training.step import TrainStep

Flags = tuple[bool, ...]


class Pass(Recorded):
    """The pass of one task over a layout."""

    shared: Flags = ()
    """Which of the rule's parameters it reaches."""
    own: Flags = ()
    """Which of the others."""


class TaskGraphs:
    """Runs steps on the current stream, as graphs where their layouts have come up before; see `Graphs`."""

    def __init__(self, step: TrainStep, rule: Surgery) -> None:
        self.step, self.rule = step, rule
        self.clear()

    def clear(self) -> None:
        """Forget everything: what learns has changed."""
        self.recorded: dict[tuple[Layout, int, int], Pass] = {}
        self.updates: dict[tuple[Flags, Flags], tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self.pool: Any = None
        self.rows: Tensor | None = None
        self.own: list[Parameter] = []
        self.buffers: list[Tensor] = []
        self.rates = torch.zeros(len(self.step.optimizer.param_groups), device=self.step.model.device)

    def run(self, staged: Sequence[Staged], rates: list[float]) -> None:
        """One batch for each task, and the update after them."""
        self._lay_out()
        if self.buffers:
            torch._foreach_zero_(self.buffers)
        passes = [self._pass(one, row, len(staged), rates) for row, one in enumerate(staged)]
        reached = np.array([one.shared for one in passes], dtype=bool)
        self.rule.combine([one.layout.parts[0][0] for one in staged], reached)
        self.rates.copy_(passes[0].rates)
        self._update(_any([one.shared for one in passes]), _any([one.own for one in passes]))

    def _lay_out(self) -> None:
        """Where gradients go."""
        self.rule.lay_out()
        if self.rule.rows is self.rows:
            return
        self.clear()
        self.rows = self.rule.rows
        shared = {id(parameter) for parameter in self.rule.shared}
        own = [p for p in self.step.parameters() if p.requires_grad and id(p) not in shared]
        self.own, self.buffers = own, [torch.zeros_like(parameter) for parameter in own]

    def _pass(self, staged: Staged, row: int, tasks: int, rates: list[float]) -> Pass:
        key = (staged.layout, row, tasks)
        entry = self.recorded.get(key)
        if entry is None:
            entry = Pass(staged.layout, self.step.model.device)
            if len(self.recorded) < graphs.MOST:
                self.recorded[key] = entry
        staged.send(entry.block, rates)
        if entry.graph is not None:
            entry.graph.replay()
            return entry
        self._work(entry, row, tasks)
        if key in self.recorded:
            entry.graph = record(lambda: self._work(entry, row, tasks), self.pool)
            self.pool = entry.graph.pool()
        return entry

    def _work(self, entry: Pass, row: int, tasks: int) -> None:
        """A task's gradient, where it is to go; the parameters have none afterwards."""
        entry.shared = tuple(self.rule.take(row, self.step.loss_of(entry.batch, tasks)))
        found = [(buffer, p.grad) for p, buffer in zip(self.own, self.buffers, strict=True) if p.grad is not None]
        entry.own = tuple(parameter.grad is not None for parameter in self.own)
        if found:
            torch._foreach_add_([buffer for buffer, _ in found], [grad for _, grad in found])
        self.step.optimizer.zero_grad(set_to_none=True)

    def _update(self, shared: Flags, own: Flags) -> None:
        """Move the weights; gradients are for those that some pass reached."""
        optimizer = self.step.optimizer
        key = (shared, own)
        if key in self.updates:
            self.updates[key][0].replay()
            return
        if not optimizer.capturable:
            self._move(shared, own)
            return
        optimizer.rates = self.rates
        self._move(shared, own)
        if len(self.updates) < graphs.MOST:
            optimizer.reserve()
            graph = record(lambda: self._move(shared, own), self.pool)
            self.updates[key] = (graph, optimizer.settle())
            self.pool = graph.pool()
        optimizer.rates = None

    def _move(self, shared: Flags, own: Flags) -> None:
        for parameters, gradients, flags in (
            (self.rule.laid_out, self.rule.views[0], shared),
            (self.own, self.buffers, own),
        ):
            for parameter, gradient, there in zip(parameters, gradients, flags, strict=True):
                parameter.grad = gradient if there else None
        self.step.update()


def _any(flags: Sequence[Flags]) -> Flags:
    return tuple(any(column) for column in zip(*flags, strict=True))
