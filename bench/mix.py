"""What is trained on: the task mix of recipes/multitask.toml, its two pair tasks as a bi-encoder, or copies of a task.

Real data where it is (`--data`, or $SHARED/data), otherwise the embedded sample. A workload is a number of steps of such
a mix, the very same ones for every contender: the same tasks and rows, of similar length within a step.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Timing
from minbert.config import SAMPLE, Recipe
from minbert.data.inputs import Inputs
from minbert.data.raw import Examples
from minbert.data.samplers import make_sampler
from minbert.data.streams import Step
from minbert.data.tokenizer import Tokenizer
from minbert.preparing import prepare
from minbert.recipes import read_recipe

ROOT = Path(__file__).parent.parent
DROPOUT = ("model.dropout=0.1", "model.encoder_dropout=0.1")
NEVER = 10**9  # steps between evaluations, and between lines of the log


@dataclass(frozen=True)
class Counts:
    """What a number of steps consist of. Padding is not counted."""

    examples: int
    texts: int
    """Sequences that the encoder reads: two an example where both texts of a pair are read apart."""
    tokens: int
    squares: int
    """Sum of squared lengths: (query, key) pairs of attention."""


@dataclass(frozen=True, eq=False)
class Mix:
    """A recipe with its training rows."""

    recipe: Recipe
    examples: Mapping[str, Examples]
    inputs: Mapping[str, Inputs]
    source: str

    def workload(self, batch_size: int, timing: Timing) -> Workload:
        """So many steps of it, all within one epoch: every row comes as often as that takes."""
        recipe = self.recipe
        a_step = batch_size * (len(recipe.tasks) if recipe.sampler.kind == "all" else 1)
        a_pass = sum(task.fraction * len(self.inputs[task.name]) for task in recipe.tasks)
        factor = max(1.0, math.ceil(1.2 * (timing.total + 2) * a_step / a_pass))
        tasks = tuple(replace(task, fraction=task.fraction * factor) for task in recipe.tasks)
        training = replace(recipe.training, batch_size=batch_size)
        return Workload(replace(recipe, tasks=tasks, training=training), self.inputs, timing, self.source)


@dataclass(frozen=True, eq=False)
class Workload:
    recipe: Recipe
    inputs: Mapping[str, Inputs]
    timing: Timing
    source: str

    @cached_property
    def steps(self) -> list[Step]:
        """Those of the warm-up, which are the timed ones before their time, over and over, and the timed ones.

        A fast path may prepare something for each layout of batch that it meets: so it has met those that are timed.
        """
        return [*islice(cycle(self.timed), self.timing.warm_up), *self.timed]

    @cached_property
    def timed(self) -> list[Step]:
        """The first steps that the recipe's trainer does."""
        recipe = self.recipe
        sampler = make_sampler(
            recipe.sampler,
            {name: inputs.lengths for name, inputs in self.inputs.items()},
            epochs=recipe.training.epochs,
            batch_size=recipe.training.batch_size,
            batch_tokens=recipe.training.batch_tokens,
            fractions={task.name: task.fraction for task in recipe.tasks},
            seed=recipe.seed,
        )
        count = self.timing.rounds * self.timing.steps
        found = list(islice(chain.from_iterable(sampler.epochs()), count))
        if len(found) < count:
            raise ValueError(f"{len(found)} steps of this mix; expected {count}")
        return found

    def rounds(self) -> list[Counts]:
        """What each round of a run consists of."""
        size = self.timing.steps
        return [self.count(self.timed[start : start + size]) for start in range(0, len(self.timed), size)]

    def count(self, steps: Sequence[Step]) -> Counts:
        lengths = {name: [view.lengths for view in inputs.views] for name, inputs in self.inputs.items()}
        parts = [part for step in steps for part in step]
        found = np.concatenate([view[part.rows] for part in parts for view in lengths[part.task]])
        return Counts(sum(len(part.rows) for part in parts), len(found), int(found.sum()), int((found**2).sum()))


def find_data(given: Path | None) -> Path | None:
    """The folder with the real datasets; None means the embedded sample."""
    if given is not None:
        return None if str(given) == "embedded" else given
    folder = Path(os.environ.get("SHARED", "../shared")) / "data"
    return folder if (folder / "cs224n").is_dir() else None


def task_mix(encoder: Path, data: Path | None, sets: Sequence[str] = ()) -> Mix:
    """SST, Quora and STS, each pair read as one input."""
    return _mix("multitask" if data else "sample", encoder, data, [*DROPOUT, *sets])


def pair_mix(encoder: Path, data: Path | None, sets: Sequence[str] = ()) -> Mix:
    """Quora and STS as a bi-encoder: mean pooling, cosine against 0 to 1, nothing between the two but the cosine."""
    paraphrase, similarity = ("quora", "sts") if data else ("paraphrase", "similarity")
    shape = {"kind": "pair-regression", "classes": [], "class_weights": [], "low": 0.0, "high": 1.0}
    cosine = {"head": "cosine", "loss": "cosine-mse", "fraction": 1.0}
    tables = {paraphrase: {**shape, **cosine}, similarity: cosine}
    settings = [f"tasks.{task}.{key}={_toml(value)}" for task, row in tables.items() for key, value in row.items()]
    settings += ["model.pooling=mean", "model.dropout=0.0", DROPOUT[1]]
    return _mix("multitask" if data else "sample", encoder, data, [*settings, *sets], (paraphrase, similarity))


def task_copies(encoder: Path, data: Path | None, copies: int, sets: Sequence[str] = ()) -> Mix:
    """STS so many times over, as tasks of their own with a head each; every step has a batch of all of them."""
    name = "sts" if data else "similarity"
    one = _mix("multitask" if data else "sample", encoder, data, [*DROPOUT, "sampler.kind=all", *sets], (name,))
    task, inputs, examples = one.recipe.tasks[0], one.inputs[name], one.examples[name]
    tasks = tuple(replace(task, name=f"{name}-{number}", fraction=1.0) for number in range(copies))
    return Mix(
        replace(one.recipe, tasks=tasks),
        {row.name: examples for row in tasks},
        {row.name: replace(inputs, task=row) for row in tasks},
        one.source,
    )


def _mix(name: str, encoder: Path, data: Path | None, sets: Sequence[str], only: Sequence[str] = ()) -> Mix:
    plain = ["training.epochs=1", f"training.evaluate_every={NEVER}", f"training.log_every={NEVER}"]
    recipe = read_recipe(
        ROOT / "recipes" / f"{name}.toml", sets=[f"model.encoder={_toml(str(encoder))}", *plain, *sets]
    )
    if only:
        recipe = replace(recipe, tasks=tuple(recipe.task(task) for task in only))
    found = prepare(recipe, Tokenizer.load(encoder), data or SAMPLE, ("train",))
    rows = ", ".join(f"{len(inputs):,} {task}" for task, inputs in found.inputs["train"].items())
    where = "training rows" if data else "rows of the embedded sample"
    return Mix(recipe, found.examples["train"], found.inputs["train"], f"{where}: {rows}")


def _toml(value: Any) -> str:
    return json.dumps(value)  # texts, numbers and lists are written alike
