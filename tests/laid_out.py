"""Batches of two tasks with sequences of chosen lengths, for tests of fixed layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minbert.config import Recipe
from minbert.data.inputs import Batch, Inputs, collate
from minbert.data.streams import Part
from minbert.data.tokenizer import Truncation
from minbert.model.multitask import MultitaskModel
from minbert.recipes import parse_recipe
from tests.sequences import masking_of, small_encoder, texts_of, tokens_of

TASKS: dict[str, dict[str, Any]] = {"sst": {}, "sts": {"head": "cosine"}}  # one view, and two


def recipe_of(**tables: Any) -> Recipe:
    return parse_recipe({"name": "laid-out", "tasks": TASKS, **tables})


def model_of(recipe: Recipe, pooling: str = "cls", **shape: Any) -> MultitaskModel:
    """The same weights every time."""
    generator = torch.Generator().manual_seed(2)
    encoder = small_encoder(**{"layers": 1, **shape})
    return MultitaskModel(encoder, recipe.tasks, pooling=pooling, dropout=0.0, generator=generator)  # type: ignore[arg-type]


def masked_recipe_of(**tables: Any) -> Recipe:
    """A task of one view, and one that guesses tokens."""
    mlm = {"like": "sst", "kind": "masked"}
    return parse_recipe({"name": "laid-out", "tasks": {"sst": {}, "mlm": mlm}, **tables})


def masked_batch_of(texts: Sequence[int], one: Sequence[int] = (), *, rate: float = 0.15, seed: int = 0) -> Batch:
    """A text to guess in for each length of `texts`, and a row of "sst" for each of `one`."""
    sst, mlm = masked_recipe_of().tasks
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, len(one)).astype(np.float64)
    data = {
        "sst": Inputs(sst, (tokens_of(one, seed=seed, sort=False),), labels, Truncation()),
        "mlm": Inputs(mlm, (texts_of(texts, seed),), None, Truncation(), masking_of(rate=rate, place=1)),
    }
    rows = {"sst": rng.permutation(len(one)), "mlm": rng.permutation(len(texts))}
    return collate(tuple(Part(name, numbers) for name, numbers in rows.items() if len(numbers)), data)


def batch_of(one: Sequence[int], two: Sequence[int] = (), *, seed: int = 0) -> Batch:
    """A row of "sst" for each length of `one`, and a row of "sts" for every two of `two`."""
    tasks = {task.name: task for task in recipe_of().tasks}
    rng = np.random.default_rng(seed)
    half = len(two) // 2
    views = {
        "sst": (tokens_of(one, seed=seed, sort=False),),
        "sts": (
            tokens_of(two[:half], seed=seed + 1, sort=False),
            tokens_of(two[half : 2 * half], seed=seed + 2, sort=False),
        ),
    }
    labels = {"sst": rng.integers(0, 5, len(one)).astype(np.float64), "sts": rng.uniform(0, 5, half)}
    data = {name: Inputs(task, views[name], labels[name], Truncation()) for name, task in tasks.items()}
    rows = {"sst": rng.permutation(len(one)), "sts": rng.permutation(half)}
    return collate(tuple(Part(name, numbers) for name, numbers in rows.items() if len(numbers)), data)
