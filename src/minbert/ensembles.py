"""Several models that answer as one: the mean of their answers.

    ensemble("runs/five", ["runs/a", "runs/b/models/step-00000120"])      # a model folder like any other
    train("recipes/many.toml")                                            # with [ensemble] runs = 2, models = 5

A recipe with `[ensemble]` trains itself `runs` times, into RUN/runs/SEED, and RUN/model is the ensemble of the best
snapshots of all those runs. What an ensemble answers is in `delivery/predictor.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minbert.config import Recipe, data_folder
from minbert.data.cache import TokenCache
from minbert.delivery.predictor import Ensemble, Predictor
from minbert.encoders import find_encoder
from minbert.errors import MinbertError, shown
from minbert.evaluating import dev_outputs
from minbert.evaluation.evaluate import choose_decision, evaluate_task, overall
from minbert.evaluation.results import read_results
from minbert.experiment import Run, check_run, new_model, open_run, train
from minbert.finishing import finish
from minbert.locks import held
from minbert.machine import choose_device, choose_precision, set_threads
from minbert.model.manifest import MANIFEST, Manifest, check_members, read_manifest, update_manifest
from minbert.model.neighbours import Neighbours
from minbert.model.pretrained import weights_digest
from minbert.model.saved import save_ensemble
from minbert.preparing import Prepared, Preparing, check_same_files, prepare, train_sample_of
from minbert.recipes import members_of
from minbert.training.trainer import Watcher


def ensemble(
    out: str | Path,
    models: Sequence[str | Path],
    *,
    overwrite: bool = False,
    tune: bool = False,
    data: str | Path | None = None,
    device: str = "auto",
    watcher: Preparing | None = None,
) -> Path:
    """Write the model folder `out` whose answers are the mean of some models' answers.

    Args:
        models: model folders, or folders of runs, which stand for the models they chose. An ensemble among them stands
            for its members. They need the same tasks (names, kinds, classes, scales); all the rest may differ.
        overwrite: replace a folder that is there.
        tune: choose the ensemble's temperatures and thresholds on dev, and note its scores there; without it a class is
            answered as the mean probabilities are.
        data: for `tune`, where the files lie.
        device: for `tune`.
    """
    folder = Path(out)
    if isinstance(models, str | Path):
        raise MinbertError(f"models is {str(models)!r}; expected a list of folders")
    members = [member for model in models for member in _members(Path(model))]
    if len(members) < 2:
        raise MinbertError(f"an ensemble of {len(members)} models; expected two or more")
    if folder.resolve() in [Path(place).resolve() for place in (*models, *members)]:
        raise MinbertError(f"{shown(folder)} is one of the models; expected another folder for the ensemble")
    if folder.exists() and not overwrite:
        raise MinbertError(f"{shown(folder)} is there already; expected a new folder, or --overwrite")
    if folder.exists() and not (folder / MANIFEST).exists():
        raise MinbertError(f"{shown(folder)}: no {MANIFEST}; expected a model folder to replace")
    manifests = [read_manifest(member) for member in members]
    check_members(manifests, [shown(member) for member in members])
    _save(folder, members, replace(manifests[0], decisions={}, scores={}))
    if tune:
        _tune(folder, data=data, device=device, watcher=watcher)
    return folder


def _members(folder: Path) -> list[Path]:
    """The single models that a folder stands for."""
    if not (folder / MANIFEST).exists() and (folder / "model" / MANIFEST).exists():
        folder = folder / "model"
    manifest = read_manifest(folder)
    return [folder / name for name in manifest.members] if manifest.members else [folder]


def _save(folder: Path, members: Sequence[Path], manifest: Manifest) -> None:
    try:
        save_ensemble(folder, members, manifest)
    except OSError as error:  # shutil's own class is one too
        reason = error.strerror or str(error)
        raise MinbertError(f"{shown(folder)}: the ensemble could not be saved ({reason}); free some space") from None


def _tune(folder: Path, *, data: str | Path | None, device: str, watcher: Preparing | None) -> None:
    set_threads()
    predictor = Predictor.load(folder, device=str(choose_device(device)))
    rng = np.random.default_rng(Recipe.seed)
    decisions, dev = {}, {}
    for name, (labels, outputs) in dev_outputs(predictor, data=data, watcher=watcher).items():
        task = predictor.tasks[name]
        decisions[name] = choose_decision(task, labels, outputs)
        dev[name] = evaluate_task(task, labels, outputs, rng=rng)
    scores = {
        "overall": overall({name: found.score for name, found in dev.items()}, predictor.tasks),
        "dev": {name: found.summary() for name, found in dev.items()},
    }
    update_manifest(folder, replace(predictor.manifest, decisions=decisions, scores=scores))


def train_ensemble(
    recipe: Recipe,
    folder: Path,
    *,
    data: str | Path | None,
    device: str,
    resume: bool,
    overwrite: bool,
    watcher: Watcher,
) -> Run:
    """Train a recipe with `[ensemble]`: its runs, then their best snapshots as one model, scored as every run's is."""
    weights = weights_digest(find_encoder(recipe.model.encoder))
    check_run(folder, recipe, weights, resume=resume, overwrite=overwrite)
    where = choose_device(device)
    set_threads()
    tokenizer, first, _ = new_model(recipe, where)
    prepared = prepare(
        recipe,
        tokenizer,
        data_folder(recipe, data),
        cache=TokenCache.from_environment(watcher.warn),
        watcher=watcher if isinstance(watcher, Preparing) else None,
        nearest=Neighbours(first, tokenizer, max_tokens=recipe.model.max_tokens),
    )
    del first
    if resume:
        check_same_files(folder, prepared)
    with held(folder):
        open_run(folder, recipe, prepared, weights, overwrite=overwrite and not resume)
        results = _train_members(
            recipe, folder, prepared, weights, where, data=data, device=device, resume=resume, watcher=watcher
        )
    return Run(folder, results)


def _train_members(
    recipe: Recipe,
    folder: Path,
    prepared: Prepared,
    weights: str,
    where: torch.device,
    *,
    data: str | Path | None,
    device: str,
    resume: bool,
    watcher: Watcher,
) -> dict[str, Any]:
    """The runs, and of their best snapshots one model; returns its results."""
    runs: dict[int, Mapping[str, Any]] = {}
    for own in members_of(recipe):
        if isinstance(watcher, Preparing):
            watcher.prepared(f"run {len(runs) + 1} of {recipe.ensemble.runs}, seed {own.seed}")
        place = folder / "runs" / str(own.seed)
        there = _finished_member(own, place, weights) if resume else None
        runs[own.seed] = (
            there or train(own, out=place, data=data, device=device, resume=resume, watcher=watcher).results
        )
    chosen = best_snapshots(runs, recipe.ensemble.models)
    if len(chosen) < recipe.ensemble.models:
        watcher.warn(f"the runs kept {len(chosen)} snapshots; ensemble.models is {recipe.ensemble.models}")
    if not chosen:
        raise MinbertError(f"{shown(folder)}: no snapshot could be saved; free some space and train it anew")
    members = [folder / one["folder"] for one in chosen]
    _save(folder / "model", members, read_manifest(members[0]))
    together = Predictor.load(folder / "model", device=str(where))
    assert isinstance(together, Ensemble)
    precision = choose_precision(recipe.training.precision, where)
    for member in together.members:
        member.model.use(precision, kernels=recipe.training.kernels)
    done: dict[str, Any] = {
        key: sum(results[key] for results in runs.values())
        for key in ("steps", "planned_steps", "whole_steps", "rows", "seconds")
    }
    done["seconds"] = round(done["seconds"], 1)
    done["members"] = chosen
    done |= {"encoder_weights": weights, "untrained_pooler": next(iter(runs.values())).get("untrained_pooler")}
    sample = train_sample_of(prepared.inputs["train"], recipe)
    try:
        results = finish(recipe, folder, prepared, sample, together.outputs_of, done, where)
    except OSError as error:
        raise MinbertError(f"{shown(folder)}: results not written ({error.strerror}); --resume tries again") from error
    return results


def _finished_member(recipe: Recipe, folder: Path, weights: str) -> Mapping[str, Any] | None:
    """The results of one of the runs that is done, where its snapshots are still there."""
    if not (folder / "results.json").exists():  # the last that a run writes
        return None
    check_run(folder, recipe, weights, resume=True, overwrite=False)
    results = read_results(folder)
    return results if all((folder / snapshot["folder"]).exists() for snapshot in results["snapshots"]) else None


def best_snapshots(runs: Mapping[int, Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """The snapshots with the highest aggregates in the results of some runs, by seed; of equals the earlier."""
    found = [
        {**snapshot, "folder": f"runs/{seed}/{snapshot['folder']}", "seed": seed}
        for seed, results in runs.items()
        for snapshot in results["snapshots"]
    ]
    return sorted(found, key=lambda one: (-one["aggregate"], one["seed"], one["step"]))[:count]
