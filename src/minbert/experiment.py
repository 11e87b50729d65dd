"""A recipe from files to a finished run: what `minbert train` and `minbert.train` do.

    run = train("recipes/sample.toml", out="runs/sample")
    run.results["overall"]

A run's folder holds recipe.toml (resolved), metrics.jsonl, results.json, checkpoints/, predictions/ and model/, the
chosen model, which every other command takes. With stages, stages/1-NAME/ is a run's folder too, less its checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from minbert.config import Recipe, data_folder
from minbert.data.cache import TokenCache
from minbert.data.tokenizer import Tokenizer
from minbert.encoders import find_encoder
from minbert.errors import MinbertError, shown
from minbert.evaluation.evaluate import quick_scores
from minbert.evaluation.results import read_results, write_json
from minbert.finishing import done_by, finish, geometries
from minbert.locks import held
from minbert.machine import choose_device, set_threads
from minbert.model.manifest import Manifest
from minbert.model.multitask import MultitaskModel, outputs_of
from minbert.model.neighbours import Neighbours
from minbert.model.pretrained import has_vocabulary, load_folder, load_vocabulary, weights_digest
from minbert.model.saved import build_model, load_model, save_model
from minbert.preparing import (
    Prepared,
    Preparing,
    changed_files,
    check_same_files,
    check_still_there,
    dev_sample_of,
    prepare,
    train_sample_of,
)
from minbert.recipe_checks import idle_settings
from minbert.recipes import (
    STARTED,
    as_recipe,
    begins,
    read_recipe,
    stage_folder,
    started_otherwise,
    write_started,
)
from minbert.training.trainer import Silent, Trainer, Watcher


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    results: Mapping[str, Any]

    @property
    def model(self) -> Path:
        """The chosen model's folder."""
        return self.folder / "model"


@runtime_checkable
class StageWatcher(Protocol):
    """A watcher that also wants to know which part of a run with stages begins."""

    def entering(self, name: str, number: int, parts: int) -> None:
        """A stage, or after them, as the last part, the recipe's own tasks."""


@torch.random.fork_rng(devices=[])  # new layers draw from torch's own generator, which is put back as it was
def train(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    data: str | Path | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    watcher: Watcher | None = None,
) -> Run:
    """Train a recipe and evaluate the chosen model.

    Args:
        recipe: a `Recipe`, a TOML file, or a dictionary of the same shape.
        out: the run's folder; default runs/NAME-seedN.
        data: where the recipe's files lie; default see `config.data_folder`.
        device: "cpu", "cuda" or "auto" (a GPU where there is one).
        resume: go on from the last checkpoint of a run that was stopped; or of a finished one with more epochs, where
            nothing else changes and the learning rate is constant.
        overwrite: replace a run that is there.
        watcher: is told how it goes.
    """
    recipe = as_recipe(recipe)
    watcher = watcher or Silent()
    folder = Path(out) if out is not None else Path("runs") / f"{recipe.name}-seed{recipe.seed}"
    if recipe.ensemble.models:
        from minbert.ensembles import train_ensemble

        return train_ensemble(
            recipe, folder, data=data, device=device, resume=resume, overwrite=overwrite, watcher=watcher
        )
    weights = weights_digest(find_encoder(recipe.model.encoder))
    check_run(folder, recipe, weights, resume=resume, overwrite=overwrite)
    where = choose_device(device)
    set_threads()
    phases = _phases(recipe, folder)
    done = list(takewhile(Phase.is_finished, phases[:-1])) if resume else []
    left = phases[len(done) :]
    made = new_model(left[0].recipe, where, start=_encoder_of(done), stage=left[0].stage)
    # Hard negatives are near by the encoder that the whole run started from, also when stages are behind it.
    tokenizer, first, _ = made if not done else new_model(recipe, where)
    # Everything is read before anything is trained: a file that is wrong is found now, not after the stages.
    prepared = _prepare_phases(left, tokenizer, first, data_folder(recipe, data), watcher)
    about = {"encoder_weights": weights, "untrained_pooler": first.encoder.pooler.is_untrained}
    del first
    if resume:
        for phase in left:
            check_same_files(phase.folder, prepared[phase.folder])
        for phase in done:
            check_still_there(phase.folder, phase.recipe, data_folder(recipe, data))
    with held(folder):
        open_run(folder, recipe, prepared[folder], weights, overwrite=overwrite and not resume)
        for message in (
            *idle_settings(recipe),
            *([UNTRAINED] if about["untrained_pooler"] and _reads_pooler(phases) else []),
        ):
            watcher.warn(message)
        for phase in left:
            if recipe.stages and isinstance(watcher, StageWatcher):
                watcher.entering(phase.recipe.name, len(done) + 1, len(phases))
            if phase is not left[0]:
                made = new_model(phase.recipe, where, start=_encoder_of(done), stage=phase.stage)
            if phase.stage:
                open_run(phase.folder, phase.recipe, prepared[phase.folder], weights, overwrite=not resume)
            results = _train_phase(phase, made, prepared[phase.folder], where, about, resume=resume, watcher=watcher)
            done.append(phase)
            _forget_checkpoints(done)
    return Run(folder, results)


@dataclass(frozen=True)
class Phase:
    """A stage of a run, or, after them, the recipe's own tasks."""

    folder: Path
    recipe: Recipe
    stage: int
    """Its number, counted from 1; 0 for the recipe's own tasks."""

    def is_finished(self) -> bool:
        """results.json is the last thing that a run writes."""
        return (self.folder / "results.json").exists() and (self.folder / "model").exists()


def _phases(recipe: Recipe, folder: Path) -> list[Phase]:
    """Of a run, in the order they are trained."""
    stages = enumerate(recipe.stages, start=1)
    return [*(Phase(stage_folder(folder, n, stage), stage, n) for n, stage in stages), Phase(folder, recipe, 0)]


def _reads_pooler(phases: Sequence[Phase]) -> bool:
    return any("pooler" in Manifest(phase.recipe.tasks, phase.recipe.model).poolings.values() for phase in phases)


def _forget_checkpoints(done: Sequence[Phase]) -> None:
    """Of finished stages, whose models are what goes on."""
    for phase in done:
        if phase.stage:
            shutil.rmtree(phase.folder / "checkpoints", ignore_errors=True)


def _prepare_phases(
    phases: Sequence[Phase], tokenizer: Tokenizer, first: MultitaskModel, folder: Path, watcher: Watcher
) -> dict[Path, Prepared]:
    """The data of the stages and of the recipe's own tasks, by the folders they are trained in."""
    return {
        phase.folder: prepare(
            phase.recipe,
            tokenizer,
            folder,
            cache=TokenCache.from_environment(watcher.warn),
            watcher=watcher if isinstance(watcher, Preparing) else None,
            nearest=Neighbours(first, tokenizer, max_tokens=phase.recipe.model.max_tokens),
        )
        for phase in phases
    }


def _encoder_of(done: Sequence[Phase]) -> Path | None:
    """What the last of the finished stages hands on."""
    return done[-1].folder / "model" / "encoder" if done else None


OF_STAGES = ("overall", "dev", "steps", "planned_steps", "whole_steps", "rows", "seconds", "data", "geometry")


def _stages_before(phase: Phase) -> dict[str, Any]:
    """What results.json says of the stages."""
    found = {}
    for stage in _phases(phase.recipe, phase.folder)[:-1]:
        results = read_results(stage.folder)
        found[stage.recipe.name] = {key: results[key] for key in OF_STAGES if results.get(key, {}) != {}}
    return found


def _train_phase(
    phase: Phase,
    made: tuple[Tokenizer, MultitaskModel, Manifest],
    prepared: Prepared,
    device: torch.device,
    about: Mapping[str, Any],
    *,
    resume: bool,
    watcher: Watcher,
) -> dict[str, Any]:
    """Train one phase; returns its results. `about`: what else they are to say."""
    recipe, folder = phase.recipe, phase.folder
    tokenizer, model, manifest = made
    layers = masked_layers(recipe)
    if layers and isinstance(watcher, Preparing):
        found = "; ".join(f"{name} {origin}" for name, origin in layers.items())
        watcher.prepared(f"prediction layer of masked tasks: {found}")
    sample = train_sample_of(prepared.inputs["train"], recipe)
    dev = dev_sample_of(prepared.inputs["dev"], recipe)

    def evaluate(current: MultitaskModel) -> dict[str, dict[str, float]]:
        scores = {"dev": quick_scores(current, dev)}
        return scores | ({"train": quick_scores(current, sample)} if sample else {})

    def save(current: MultitaskModel, name: str) -> None:
        save_model(folder / name, current, tokenizer, manifest)

    trainer = Trainer(
        recipe, model, prepared.inputs["train"], run=folder, evaluate=evaluate, save=save, watcher=watcher
    )
    trainer.train(resume=resume)
    if not (folder / "model").exists():
        raise MinbertError(f"{shown(folder)}: the chosen model could not be saved; free some space and use --resume")
    chosen, _, _ = load_model(folder / "model", device=str(device))
    chosen.use(trainer.precision, kernels=recipe.training.kernels)
    try:
        done = {
            **done_by(trainer),
            **about,
            "geometry": geometries(chosen, tokenizer, prepared, recipe),
            "masked_layers": layers,
            "stages": _stages_before(phase),
        }
        results = finish(recipe, folder, prepared, sample, partial(outputs_of, chosen), done, device)
    except OSError as error:
        raise MinbertError(f"{shown(folder)}: results not written ({error.strerror}); --resume tries again") from error
    changed = changed_files(prepared)
    if changed:
        watcher.warn(f"{', '.join(changed)} changed while the run was going; it used what it had read at the start")
    return results


def new_model(
    recipe: Recipe, device: torch.device, *, start: Path | None = None, stage: int = 0
) -> tuple[Tokenizer, MultitaskModel, Manifest]:
    """The recipe's encoder, or what a stage made of it (`start`), with fresh heads, seeded by the recipe.

    Args:
        stage: its number, counted from 1; 0 for a recipe's own tasks. Layers of two parts of a run begin differently, else
            the encoder would have been trained to suit those of the next part.
    """
    folder = find_encoder(recipe.model.encoder)
    generator = torch.Generator().manual_seed(recipe.seed)
    encoder, _ = load_folder(start or folder, dropout=recipe.model.encoder_dropout, generator=generator)
    if stage:
        generator.manual_seed(int(np.random.SeedSequence([recipe.seed, stage]).generate_state(1)[0]))
    manifest = Manifest(recipe.tasks, recipe.model, recipe=recipe.name, data=recipe.data)
    model = build_model(manifest, encoder, generator=generator)
    for task in recipe.tasks:
        if task.is_masked:
            load_vocabulary(folder, model.heads[task.name])
    return Tokenizer.load(folder), model.to(device), manifest


UNTRAINED = (
    "the encoder's pooler was never trained (its bias is 0): "
    'what pooling "pooler" reads is random at first; "cls" and "mean" read what the encoder has learnt'
)


def masked_layers(recipe: Recipe) -> dict[str, str]:
    """Where the prediction layer of each masked task comes from: the encoder's file ("published"), or "fresh"."""
    masked = [task.name for task in recipe.tasks if task.is_masked]
    if not masked:
        return {}
    return dict.fromkeys(masked, "published" if has_vocabulary(find_encoder(recipe.model.encoder)) else "fresh")


def check_run(folder: Path, recipe: Recipe, weights: str, *, resume: bool, overwrite: bool) -> None:
    """May a run of this recipe and of these weights of its encoder write into the folder?"""
    if not (folder / STARTED).exists():
        return
    if resume:
        if changed := started_otherwise(folder, recipe, weights):
            raise MinbertError(f"{shown(folder)} was started otherwise: {'; '.join(changed)}")
    elif not overwrite:
        raise MinbertError(f"{shown(folder)} holds a run already; --resume goes on with it, --out names another folder")


def open_run(folder: Path, recipe: Recipe, prepared: Prepared, weights: str, *, overwrite: bool) -> None:
    """Only now, when recipe, encoder and data were found good, is an older run replaced or a new one begun."""
    try:
        _open(folder, recipe, prepared, weights, overwrite=overwrite)
    except OSError as error:
        raise MinbertError(f"{shown(folder)}: cannot be written ({error.strerror}); expected room for a run") from error


def _open(folder: Path, recipe: Recipe, prepared: Prepared, weights: str, *, overwrite: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STARTED
    if overwrite:
        for name in ("checkpoints", "model", "models", "predictions", "tensorboard", "stages"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for member in (folder / "runs").glob("*/recipe.toml"):
            if member.parent.name.isdigit():  # an ensemble's, by seed
                shutil.rmtree(member.parent, ignore_errors=True)
        for name in ("results.json", "metrics.jsonl", "data.json"):
            (folder / name).unlink(missing_ok=True)
    elif path.exists() and begins(read_recipe(path), recipe):
        (folder / "results.json").unlink(missing_ok=True)  # of fewer epochs
    write_started(folder, recipe, weights)
    write_json(folder / "data.json", prepared.notes())
