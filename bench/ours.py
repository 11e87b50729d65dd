"""Our trainer, timed from outside: the real loop, watched by a stopwatch that stops it after the last round."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measure import Stopwatch, Timed, fresh_memory, peak_memory
from bench.mix import Workload
from minbert.config import Recipe
from minbert.data.inputs import Inputs
from minbert.data.streams import Step
from minbert.experiment import new_model
from minbert.training.trainer import Silent, Trainer, Watcher


class Enough(Exception):  # noqa: N818 - the end of a measurement, not an error
    """Raised by a watcher to leave the loop."""


class TimeKeeper(Silent):
    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def stepped(self, step: int, record: Mapping[str, Any] | None) -> None:  # noqa: ARG002 - a watcher's signature
        if self.watch.tick(step):
            raise Enough


class Replay:
    """A sampler of steps that are given."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    def epochs(self) -> Iterator[Iterator[Step]]:
        return iter([iter(self.steps)])


def run_trainer(
    recipe: Recipe,
    inputs: Mapping[str, Inputs],
    device: torch.device,
    watcher: Watcher,
    steps: Sequence[Step] | None = None,
) -> None:
    """Train until the watcher has enough, on the sampler's steps or those given. Nothing is scored or kept."""
    with tempfile.TemporaryDirectory() as run, torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        _, model, _ = new_model(recipe, device)
        trainer = Trainer(
            recipe,
            model,
            inputs,
            run=Path(run),
            evaluate=lambda _: {"dev": {task.name: 0.0 for task in recipe.tasks}},
            save=lambda _model, _name: None,
            watcher=watcher,
        )
        if steps is not None:
            trainer.sampler = Replay(steps)  # type: ignore[assignment] - all that the loop asks it for is epochs()
        try:
            trainer.train()
        except Enough:
            return
    raise RuntimeError("the run ended before the measurement did; expected more steps in its epoch")


def time_ours(workload: Workload, device: torch.device) -> Timed:
    fresh_memory(device)
    watch = Stopwatch(workload.timing, device)
    started = time.perf_counter()
    run_trainer(workload.recipe, workload.inputs, device, TimeKeeper(watch), workload.steps)
    before = {"seconds_before_the_first_round": watch.marks[0] - started}
    return Timed(tuple(watch.seconds), peak_memory(device), before)
