"""Does a recipe make sense as a whole? What is wrong with it is said when it is read, not after an hour of training."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import attrgetter
from typing import Any, get_args

from minbert.config import Recipe
from minbert.errors import MinbertError, suggest
from minbert.task_checks import check_class
from minbert.tasks import BUILT_IN, CONTRASTIVE, PartOfSpeech, Task, counted

SEVERAL = ("all", "mixed")  # the samplers whose steps have several tasks
LIMITS = {
    "seed": (0, math.inf),
    "model.pooling_weights": (0.001, 1000),
    "model.dropout": (0, 0.99),
    "model.encoder_dropout": (0, 0.99),
    "model.common_dropout": (0, 0.99),
    "model.max_tokens": (5, math.inf),
    "sampler.weights": (0, math.inf),
    "sampler.steps_per_epoch": (0, math.inf),
    "optimizer.lr": (0, 10),
    "optimizer.head_lr": (0, 10),
    "optimizer.betas": (0, 0.999999),
    "optimizer.eps": (0, 1),
    "optimizer.weight_decay": (0, math.inf),
    "optimizer.layer_decay": (0, 1),
    "optimizer.warmup": (0, 1),
    "optimizer.clip": (0, math.inf),
    "training.epochs": (1, math.inf),
    "training.batch_size": (1, math.inf),
    "training.batch_tokens": (0, math.inf),
    "training.accumulate": (1, math.inf),
    "training.cache_rows": (0, math.inf),
    "training.gradvac_beta": (0, 1),
    "training.cagrad_c": (0, 0.999999),
    "training.ema": (0, 0.999999),
    "training.evaluate_every": (0, math.inf),
    "training.max_steps": (0, math.inf),
    "training.train_sample": (0, math.inf),
    "training.dev_sample": (0, math.inf),
    "training.best_weights": (0, math.inf),
    "training.patience": (0, math.inf),
    "training.checkpoint_every": (0, math.inf),
    "training.keep": (1, math.inf),
    "training.log_every": (1, math.inf),
    "training.snapshots": (0, math.inf),
    "ensemble.runs": (1, math.inf),
    "ensemble.models": (0, math.inf),
    "paper.dev": (-1, 1),
    "paper.test": (-1, 1),
    "paper.train": (-1, 1),
    "paper.overall": (-1, 1),
}
"""The least and the most that a setting may be."""


def check_recipe(recipe: Recipe, where: str) -> None:
    names = [task.name for task in recipe.tasks]
    trained = [task.name for task in recipe.trained]
    sampler, training = recipe.sampler, recipe.training
    if not trained:
        raise MinbertError(f"{where}: no task is trained: {', '.join(names)}; expected one without trained = false")
    for key, order in {"sampler.order": sampler.order, "sampler.weights": sampler.weights}.items():
        for name in order:
            if name in names and name not in trained:
                raise MinbertError(f'{where}: {key} names "{name}", which has trained = false; expected it left out')
    named = {
        "model.common_tasks": recipe.model.common_tasks,
        "sampler.order": sampler.order,
        "sampler.weights": sampler.weights,
        "training.best_weights": training.best_weights,
        "training.best_task": (training.best_task,) if training.best_task else (),
    }
    for key, used in named.items():
        for name in used:
            if name not in names:
                near = suggest(name, names)
                raise MinbertError(f'{where}: {key} names "{name}"{near}; the tasks are: {", ".join(names)}')
    if recipe.model.common_tasks and not recipe.model.common_layer:
        raise MinbertError(f"{where}: model.common_tasks without a common layer; expected model.common_layer = true")
    _check_weights(recipe, where)
    if training.best == "task" and not training.best_task:
        raise MinbertError(f'{where}: training.best is "task"; expected training.best_task to say which')
    weights = dict.fromkeys(counted(dict.fromkeys(names, 1.0), {task.name: task for task in recipe.tasks}), 1.0)
    if training.best == "weighted-mean" and not any((weights | training.best_weights).values()):
        raise MinbertError(f"{where}: training.best_weights are all 0; expected one above for at least one task")
    if sampler.order and set(sampler.order) != set(trained):
        left = ", ".join(sorted(set(trained) - set(sampler.order)))
        raise MinbertError(f"{where}: sampler.order leaves out {left}; expected every task at least once")
    if training.gradients != "sum" and (sampler.kind not in SEVERAL or len(trained) < 2):
        several = " or ".join(f'"{kind}"' for kind in SEVERAL)
        found = f'sampler.kind "{sampler.kind}"' if len(trained) > 1 else f"one task, {trained[0]}"
        raise MinbertError(
            f'{where}: training.gradients is "{training.gradients}", with {found}; '
            f"expected several tasks in a step: two tasks or more, and sampler.kind {several}"
        )
    steady = recipe.optimizer.schedule == "constant" and not recipe.optimizer.warmup
    if recipe.optimizer.restart and (sampler.kind != "sequential" or steady):
        found = "a rate that never changes" if steady else f'sampler.kind "{sampler.kind}"'
        raise MinbertError(
            f'{where}: optimizer.restart with {found}; expected tasks that have their turns, "sequential", and a rate '
            "that rises or falls"
        )
    _check_contrastive(recipe, where)
    for key, (low, high) in LIMITS.items():
        for spot, number in _numbers(key, attrgetter(key)(recipe)):
            if not low <= number <= high:
                expected = f"{low} or more" if high == math.inf else f"{low} to {high}"
                raise MinbertError(f"{where}: {spot} is {number}; expected {expected}")
    for task in recipe.tasks:
        if not task.train and not task.dev and not task.test:
            raise MinbertError(f"{where}: [tasks.{task.name}] has no files; expected train and dev")
        if task.borrow is not None:
            lender(recipe, task, where)
    _check_ensemble(recipe, where)


def idle_settings(recipe: Recipe) -> list[str]:
    """What a recipe or a stage of it says and nobody reads: no error, for a base may have said it, but worth a word."""
    found = []
    for part in (*recipe.stages, recipe):
        sampler = part.sampler
        if sampler.weights and sampler.kind != "weighted":
            where = "" if part is recipe else f'stage "{part.name}": '
            weights = ", ".join(f"{task} = {weight:g}" for task, weight in sampler.weights.items())
            found.append(
                f'{where}sampler.weights ({weights}) has no effect: sampler.kind is "{sampler.kind}", not "weighted"'
            )
    return found


def _check_weights(recipe: Recipe, where: str) -> None:
    """Weights of parts of speech are there, known, and used."""
    weights, parts = recipe.model.pooling_weights, get_args(PartOfSpeech)
    for name in weights:
        if name not in parts:
            near = suggest(name, parts)
            raise MinbertError(f'{where}: model.pooling_weights names "{name}"{near}; known: {", ".join(parts)}')
    if recipe.weighted and not weights:
        example = "{ verb = 2, auxiliary = 0.5 }"
        raise MinbertError(f'{where}: pooling is "weighted"; expected model.pooling_weights, such as {example}')
    if weights and not recipe.weighted:
        raise MinbertError(f'{where}: model.pooling_weights without pooling; expected model.pooling = "weighted"')


def _check_contrastive(recipe: Recipe, where: str) -> None:
    training = recipe.training
    if training.cache_rows > 0 and training.gradients != "sum":
        raise MinbertError(
            f'{where}: training.cache_rows is {training.cache_rows} with training.gradients "{training.gradients}", '
            'which looks at each task\'s gradient by itself; expected cache_rows 0, or gradients "sum"'
        )
    if training.cache_rows > 0 and not any(task.loss in CONTRASTIVE for task in recipe.tasks):
        raise MinbertError(
            f"{where}: training.cache_rows is {training.cache_rows}, and no task has a contrastive loss "
            f"({', '.join(CONTRASTIVE)}); expected 0: other losses take smaller batches and training.accumulate"
        )
    for task in recipe.tasks:
        if task.distinct_batches and recipe.sampler.kind == "mixed":
            raise MinbertError(
                f'{where}: [tasks.{task.name}] distinct_batches with sampler.kind "mixed", whose batches are of all tasks; '
                'expected another sampler, such as "proportional"'
            )
        if training.loss_weighting == "uncertainty" and task.loss == "info-nce-printed":
            raise MinbertError(
                f'{where}: training.loss_weighting is "uncertainty", and the loss of {task.name}, "{task.loss}", can be '
                'negative, where a learned weight has no bound; expected "sum" or "mean", or the loss "info-nce"'
            )


def _check_ensemble(recipe: Recipe, where: str) -> None:
    runs, models, training = recipe.ensemble.runs, recipe.ensemble.models, recipe.training
    for task in recipe.tasks:
        if models and not task.has_label:
            raise MinbertError(
                f"{where}: ensemble.models is {models}, and {task.name} is a {task.kind} task, which has no answers to take "
                "the mean of; expected it in a stage, or no ensemble"
            )
    if runs > 1 and not models:
        raise MinbertError(f"{where}: ensemble.runs is {runs} and ensemble.models 0; expected 1 or more models")
    most = min(training.snapshots or models, models if training.evaluate_every else training.epochs)  # of each run
    if models > runs * most:
        raise MinbertError(
            f"{where}: ensemble.models is {models}; {runs} runs keep {runs * most} snapshots at most: "
            "expected fewer models, or more runs, epochs or training.snapshots"
        )


def lender(recipe: Recipe, task: Task, where: str = "recipe") -> Task:
    """The task whose rows another borrows, reading only those of the class that is asked for."""
    borrow = task.borrow
    if borrow is None:
        raise ValueError(f"{task.name} borrows nothing")
    known = {**BUILT_IN, **{other.name: other for other in recipe.tasks}}
    spot = f"{where}: [tasks.{task.name}] borrow"
    if borrow.task not in known:
        raise MinbertError(f'{spot}.task is "{borrow.task}"{suggest(borrow.task, known)}; known: {", ".join(known)}')
    found = known[borrow.task]
    if not found.is_pair or not found.train:
        what = "reads one text" if not found.is_pair else "has no training files"
        raise MinbertError(f'{spot}.task is "{borrow.task}", which {what}; expected pairs')
    if borrow.only:
        check_class(found, borrow.only, f"{spot}.only")
    return replace(found, only=borrow.only)


def _numbers(key: str, value: Any) -> list[tuple[str, float]]:
    """The numbers of a setting, each with where it stands: one or none, or those of a list or a table."""
    if isinstance(value, dict):
        return [(f"{key}.{name}", number) for name, number in value.items()]
    return [(key, number) for number in (value if isinstance(value, tuple) else [value]) if number is not None]
