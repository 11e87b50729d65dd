"""The end of a run: the chosen model is scored in full, its decisions are chosen on dev, results.json is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from minbert.config import Recipe
from minbert.data.inputs import Inputs, tokenize_view
from minbert.data.raw import Examples
from minbert.data.tokenizer import Tokenizer
from minbert.evaluation.evaluate import Evaluation, choose_decision, evaluate_task, labels_of, overall
from minbert.evaluation.geometry import PURPOSE, Geometry, measure, positives, sample
from minbert.evaluation.results import environment, gap, write_json, write_predictions
from minbert.model.manifest import read_manifest, update_manifest
from minbert.model.multitask import MultitaskModel, encode_pooled, vectors_pooled
from minbert.preparing import Prepared, pooling_weights
from minbert.recipes import as_dict, revisions
from minbert.tasks import HEADS, Task
from minbert.training.selection import snapshot_folder
from minbert.training.trainer import Trainer


def finish(
    recipe: Recipe,
    folder: Path,
    prepared: Prepared,
    sample: Mapping[str, Inputs],
    answer: Callable[[Inputs], NDArray[np.float32]],
    done: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """Score the chosen model in full, choose its decisions on dev, and write results.json.

    Args:
        answer: the chosen model's outputs.
        done: what training took and left, for results.json.
    """
    rng, aside = np.random.default_rng([recipe.seed, 4]), np.random.default_rng([recipe.seed, 4, 1])  # of dev, of train
    dev: dict[str, Evaluation] = {}
    seen: dict[str, Evaluation] = {}
    decisions, tuned = {}, {}
    for task in recipe.tasks:
        inputs = prepared.inputs["dev"][task.name]
        outputs, labels = answer(inputs), labels_of(inputs)
        dev[task.name] = evaluate_task(task, labels, outputs, rng=rng)
        decisions[task.name] = choose_decision(task, labels, outputs)
        tuned[task.name] = evaluate_task(task, labels, outputs, rng=rng, decision=decisions[task.name])
        write_predictions(folder, task, prepared.examples["dev"][task.name], dev[task.name])
        if task.name in sample:
            rows = sample[task.name]
            seen[task.name] = evaluate_task(task, labels_of(rows), answer(rows), rng=aside, samples=200)
    tasks = {task.name: task for task in recipe.tasks}
    scores = {name: found.score for name, found in dev.items()}
    results = {
        "name": recipe.name,
        "about": recipe.about,
        "encoder": recipe.model.encoder,
        "seed": recipe.seed,
        "kinds": {name: task.kind for name, task in tasks.items()},
        "overall": overall(scores, tasks),
        "dev": {name: found.summary() for name, found in dev.items()},
        "train": {name: found.summary() for name, found in seen.items()},
        "gap": {name: gap(seen[name].score if name in seen else None, score) for name, score in scores.items()},
        "tuned_on_dev": {
            name: {
                "temperature": decisions[name].temperature,
                "threshold": decisions[name].threshold if len(tasks[name].classes) == 2 else None,
                "metrics": found.summary()["metrics"],
            }
            for name, found in tuned.items()
            if tasks[name].is_classification
        },
        **done,
        "data": prepared.notes(),
        "environment": environment(str(device)),
        "revisions": revisions(recipe, *recipe.stages),
        "recipe": as_dict(recipe),
    }
    scored = {"overall": results["overall"], "dev": results["dev"]}
    manifest = read_manifest(folder / "model")
    update_manifest(folder / "model", replace(manifest, recipe=recipe.name, decisions=decisions, scores=scored))
    write_json(folder / "results.json", results)
    return results


def done_by(trainer: Trainer) -> dict[str, Any]:
    """What training took and left."""
    done = {
        "steps": trainer.step,
        "planned_steps": trainer.plan.steps,
        "whole_steps": trainer.plan.whole,
        "rows": trainer.rows,
        "seconds": round(trainer.seconds, 1),
    }
    if not trainer.recipe.training.snapshots:
        return done
    found = trainer.selection.snapshots.items()
    return done | {"snapshots": [{"folder": snapshot_folder(step), "step": step, **entry} for step, entry in found]}


def geometries(
    model: MultitaskModel, tokenizer: Tokenizer, prepared: Prepared, recipe: Recipe
) -> dict[str, Mapping[str, Any]]:
    return {
        task.name: _geometry(model, tokenizer, task, prepared.examples["dev"][task.name], recipe).summary()
        for task in recipe.tasks
        if task.answers_pairs
    }


def _geometry(model: MultitaskModel, tokenizer: Tokenizer, task: Task, examples: Examples, recipe: Recipe) -> Geometry:
    """How the texts of a sample of pairs lie to each other. They are read one by one, whatever the task's head reads:
    their vectors are those that the head compares, or else the pooled ones."""
    rng = np.random.default_rng([recipe.seed, PURPOSE])
    rows = sample(len(examples), rng)
    columns = [examples.texts] if examples.pairs is None else [examples.texts, examples.pairs]
    how, limit = model.poolings[task.name], min(recipe.model.max_tokens, tokenizer.positions)
    pooled = []
    for column in columns:
        texts = [column[row] for row in rows]
        tokens = tokenize_view("first", tokenizer, texts, None, limit, weights=pooling_weights(recipe, task))
        pooled.append(encode_pooled(model.runner, tokens, [how])[how])
    compares = HEADS[task.head].compares
    vectors = [vectors_pooled(model, task.name, [view]) if compares else view for view in pooled]
    labels = None if examples.labels is None else examples.labels[rows]
    return measure(vectors, positives(task, labels), rng, of=task.head if compares else how)
