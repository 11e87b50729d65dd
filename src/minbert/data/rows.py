"""Which rows a task is trained on: those of its files, and what a recipe has added to them.

    examples = training_rows(recipe, task, folder)

Rows of one class only are `read_split`'s work. Here come the rows that another task lends, with scores of their own, and
the negatives. Both are drawn once, from the recipe's seed, so that a run that is resumed has the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from minbert.config import Recipe
from minbert.data.negatives import Nearest, Pair, draw_negatives, groups_of, known_pairs, pair_of
from minbert.data.raw import Examples, read_split
from minbert.errors import MinbertError
from minbert.recipe_checks import lender
from minbert.tasks import Borrow, Task

BORROWED, NEGATIVES = 21, 22  # what a generator is for, as streams.PASSES
ALIKE = 0.8  # of the scale: from there on two texts mean the same


def training_rows(recipe: Recipe, task: Task, folder: Path, *, nearest: Nearest | None = None) -> Examples:
    """The rows of a task's training files and, after them, those that it borrows and its negatives.

    Args:
        recipe: the task's; it has the seed, and the task that lends.
        task: says what to add.
        folder: what file names are relative to.
        nearest: finds hard negatives; needed where the task asks for them.
    """
    own = read_split(task, "train", folder)
    if task.borrow is None and not task.negatives:
        return own
    place = recipe.tasks.index(task)
    dev = known_pairs(read_split(task, "dev", folder)) if task.dev else set()
    found = own
    if task.borrow is not None:
        lent = read_split(lender(recipe, task), "train", folder)
        rng = np.random.default_rng([recipe.seed, BORROWED, place])
        found = borrow_rows(own, lent, task.borrow, leave=dev, rng=rng)
    if task.negatives:
        # Rows that `only` left out are pairs of the files too
        whole = read_split(replace(task, only=""), "train", folder) if task.only else own
        rng = np.random.default_rng([recipe.seed, NEGATIVES, place])
        known = dev | known_pairs(whole, found)
        found = add_negatives(task, own, found, whole=whole, known=known, rng=rng, nearest=nearest)
    return found


def borrow_rows(
    own: Examples, lent: Examples, borrow: Borrow, *, leave: Collection[Pair], rng: np.random.Generator
) -> Examples:
    """The own rows, and a part of those that another task lends.

    Args:
        own: the borrowing task's.
        lent: the other's.
        borrow: how many, and with which scores.
        leave: pairs not to take (dev's); those that are among the own rows are not taken either.
        rng: draws rows and scores.
    """
    mine = known_pairs(own)
    pairs = [pair_of(*texts) for texts in zip(lent.texts, lent.pairs or (), strict=True)]
    free = np.flatnonzero([pair not in leave and pair not in mine for pair in pairs])
    if not len(free):
        raise MinbertError(f'borrow: none of the {len(lent):,} rows of "{borrow.task}" can be taken; expected some')
    size = math.ceil(round(borrow.fraction * len(free), 6))
    chosen = lent.take(np.sort(rng.choice(free, size, replace=False)))
    scored = replace(chosen, labels=rng.uniform(borrow.low, borrow.high, size))
    joined = own.extended(scored, f"borrowed from {borrow.task}")
    met = {
        f"of {borrow.task}, in dev": sum(pair in leave for pair in pairs),
        f"of {borrow.task}, here already": sum(pair in mine and pair not in leave for pair in pairs),
    }
    return replace(joined, skipped={**own.skipped, **{reason: count for reason, count in met.items() if count}})


def add_negatives(
    task: Task,
    own: Examples,
    found: Examples,
    *,
    whole: Examples,
    known: Collection[Pair],
    rng: np.random.Generator,
    nearest: Nearest | None,
) -> Examples:
    """What was found so far, with negatives of the task's own rows: borrowed ones have none.

    `whole` has the rows of all classes, which tell what belongs together.
    """
    if task.negative_kind == "mined" and nearest is None:
        raise MinbertError(f'[tasks.{task.name}] negative_kind is "mined"; expected an encoder to mine with')
    extra = draw_negatives(
        own,
        task.negatives,
        label=0.0 if task.is_classification else task.low,
        known=known,
        rng=rng,
        nearest=nearest if task.negative_kind == "mined" else None,
        groups=groups_of(whole, 1 if task.is_classification else task.low + ALIKE * (task.high - task.low)),
    )
    if not len(extra):
        raise MinbertError(f"[tasks.{task.name}] negatives: none of {len(own):,} rows has one; expected more texts")
    return found.extended(extra, f"{task.negative_kind} negatives")


def fingerprint_of(examples: Examples) -> str:
    """sha256 of rows as they are trained on, drawn ones among them."""
    digest = hashlib.sha256()
    for column in (examples.texts, examples.pairs or []):
        digest.update("\0".join(column).encode("utf-8", "surrogatepass"))
    if examples.labels is not None:
        digest.update(examples.labels.astype("<f8").tobytes())
    return digest.hexdigest()
