"""A recipe from files to a finished run: what `minbert train` and `minbert.train` do.

    run = train("recipes/sample.toml", out="runs/sample")
    run.results["overall"]

A run's folder holds recipe.toml (resolved), metrics.jsonl, results.json, checkpoints/, predictions/ and model/, the
chosen model, which every other command takes. With stages, stages/1-NAME/ is a run's folder too, less its checkpoints.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from minbert.atomic import write_text
from minbert.config import Recipe, as_dict, data_folder, differences, parse_recipe, read_recipe, to_toml
from minbert.data.cache import TokenCache
from minbert.data.inputs import Inputs, tokenize, tokenize_view
from minbert.data.negatives import Nearest
from minbert.data.raw import Examples, fingerprint, read_split
from minbert.data.rows import fingerprint_of, training_rows
from minbert.data.tokenizer import Tokenizer
from minbert.delivery.backends import Precision, choose_backend
from minbert.delivery.predictor import Predictor
from minbert.encoders import find_encoder
from minbert.errors import MinbertError, shown
from minbert.evaluation.evaluate import Evaluation, choose_decision, evaluate_task, labels_of, overall, quick_scores
from minbert.evaluation.geometry import PURPOSE, Geometry, measure, positives, sample
from minbert.evaluation.results import environment, gap, read_results, write_json, write_predictions
from minbert.machine import set_threads
from minbert.model.multitask import MultitaskModel, encode_pooled, outputs_of, vectors_pooled
from minbert.model.neighbours import Neighbours
from minbert.model.pretrained import has_vocabulary, load_folder, load_vocabulary
from minbert.model.saved import Manifest, build_model, load_model, read_manifest, save_model, update_manifest
from minbert.tasks import HEADS, Task
from minbert.training.selection import snapshot_folder
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


@dataclass(frozen=True, eq=False)
class Prepared:
    """The splits of a recipe, read and tokenized."""

    examples: Mapping[str, Mapping[str, Examples]]
    """By split and task."""
    inputs: Mapping[str, Mapping[str, Inputs]]

    def notes(self) -> dict[str, Any]:
        """What was read, skipped and cut: nothing is dropped silently."""
        return {
            split: {
                task: {
                    "rows": len(examples),
                    "skipped": dict(examples.skipped),
                    **_added(examples),
                    "truncated": {
                        "texts": self.inputs[split][task].truncation.texts,
                        "tokens": self.inputs[split][task].truncation.tokens,
                    },
                    "files": dict(examples.files),
                }
                for task, examples in tasks.items()
            }
            for split, tasks in self.examples.items()
        }


def _added(examples: Examples) -> dict[str, Any]:
    """Rows that are not the files' own, and what all of them are: a run goes on only with the very same."""
    return {"added": dict(examples.added), "sha256": fingerprint_of(examples)} if examples.added else {}


@runtime_checkable
class Preparing(Protocol):
    """A watcher that also wants to know what happens before the first step."""

    def preparing(self, what: str) -> None: ...
    def prepared(self, note: str) -> None: ...
    def warn(self, message: str) -> None: ...


@runtime_checkable
class StageWatcher(Protocol):
    """A watcher that also wants to know which part of a run with stages begins."""

    def entering(self, name: str, number: int, parts: int) -> None:
        """A stage, or after them, as the last part, the recipe's own tasks."""


class Unwatched:
    def preparing(self, what: str) -> None: ...
    def prepared(self, note: str) -> None: ...
    def warn(self, message: str) -> None:
        warnings.warn(message, stacklevel=2)


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
        resume: go on from the last checkpoint of a run that was stopped.
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
    check_run(folder, recipe, resume=resume, overwrite=overwrite)
    where = choose_device(device)
    set_threads()
    parts = {stage_folder(folder, number, stage): stage for number, stage in enumerate(recipe.stages, start=1)}
    done = list(takewhile(_is_finished, parts)) if resume else []
    parts[folder] = recipe
    left = {path: part for path, part in parts.items() if path not in done}
    made = new_model(next(iter(left.values())), where, start=_encoder_of(done))
    # Hard negatives are near by the encoder that the whole run started from, also when stages are behind it.
    tokenizer, first, _ = made if not done else new_model(recipe, where)
    # Everything is read before anything is trained: a file that is wrong is found now, not after the stages.
    prepared = _prepare_parts(left, tokenizer, first, data_folder(recipe, data), watcher)
    del first
    if resume:
        for path, found in prepared.items():
            check_same_files(path, found)
    _open(folder, recipe, prepared[folder], overwrite=overwrite and not resume)
    for path, part in left.items():
        if recipe.stages and isinstance(watcher, StageWatcher):
            watcher.entering(part.name, len(done) + 1, len(parts))
        if path != next(iter(left)):
            made = new_model(part, where, start=_encoder_of(done))
        if path != folder:
            _open(path, part, prepared[path], overwrite=not resume)
        results = _train_part(part, path, made, prepared[path], where, resume=resume, watcher=watcher)
        done.append(path)
        _forget_checkpoints(done, folder)
    return Run(folder, results)


def stage_folder(run: Path, number: int, stage: Recipe) -> Path:
    """Where a run keeps its stage of this number, counted from 1."""
    return run / "stages" / f"{number}-{stage.name}"


def _is_finished(folder: Path) -> bool:
    """results.json is the last thing that a run writes."""
    return (folder / "results.json").exists() and (folder / "model").exists()


def _forget_checkpoints(done: Sequence[Path], run: Path) -> None:
    """Of finished stages, whose models are what goes on."""
    for path in done:
        if path != run:
            shutil.rmtree(path / "checkpoints", ignore_errors=True)


def _prepare_parts(
    parts: Mapping[Path, Recipe], tokenizer: Tokenizer, first: MultitaskModel, folder: Path, watcher: Watcher
) -> dict[Path, Prepared]:
    """The data of the stages and of the recipe's own tasks, by the folders they are trained in."""
    return {
        path: prepare(
            part,
            tokenizer,
            folder,
            cache=TokenCache.from_environment(watcher.warn),
            watcher=watcher if isinstance(watcher, Preparing) else None,
            nearest=Neighbours(first, tokenizer, max_tokens=part.model.max_tokens),
        )
        for path, part in parts.items()
    }


def _encoder_of(stages: Sequence[Path]) -> Path | None:
    """What the last of the finished stages hands on."""
    return stages[-1] / "model" / "encoder" if stages else None


def _stages_before(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """What results.json says of the stages."""
    found = {}
    for number, stage in enumerate(recipe.stages, start=1):
        results = read_results(stage_folder(folder, number, stage))
        found[stage.name] = {key: results[key] for key in ("overall", "dev", "steps", "rows", "seconds")}
    return found


def _train_part(
    recipe: Recipe,
    folder: Path,
    made: tuple[Tokenizer, MultitaskModel, Manifest],
    prepared: Prepared,
    device: torch.device,
    *,
    resume: bool,
    watcher: Watcher,
) -> dict[str, Any]:
    """A stage or, after them, the recipe's own tasks; returns its results."""
    tokenizer, model, manifest = made
    layers = masked_layers(recipe)
    if layers and isinstance(watcher, Preparing):
        found = "; ".join(f"{name} {origin}" for name, origin in layers.items())
        watcher.prepared(f"prediction layer of masked tasks: {found}")
    sample = train_sample_of(prepared.inputs["train"], recipe)

    def evaluate(current: MultitaskModel) -> dict[str, dict[str, float]]:
        scores = {"dev": quick_scores(current, prepared.inputs["dev"])}
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
            **_done(trainer),
            "geometry": _geometries(chosen, tokenizer, prepared, recipe),
            "masked_layers": layers,
            "stages": _stages_before(folder, recipe),
        }
        results = finish(recipe, folder, prepared, sample, partial(outputs_of, chosen), done, device)
    except OSError as error:
        raise MinbertError(f"{shown(folder)}: results not written ({error.strerror}); --resume tries again") from error
    changed = _changed_files(prepared)
    if changed:
        watcher.warn(f"{', '.join(changed)} changed while the run was going; it used what it had read at the start")
    return results


def as_recipe(recipe: Recipe | str | Path | Mapping[str, Any]) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    return parse_recipe(recipe) if isinstance(recipe, Mapping) else read_recipe(recipe)


def choose_device(name: str) -> torch.device:
    """The device by name; "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device: torch.device | None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise MinbertError(f'device is "{name}"; expected auto, cpu, cuda or cuda:N')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MinbertError(f'device is "{name}", but torch sees no GPU here; expected cpu')
    return device


def new_model(
    recipe: Recipe, device: torch.device, *, start: Path | None = None
) -> tuple[Tokenizer, MultitaskModel, Manifest]:
    """The recipe's encoder, or what a stage made of it (`start`), with fresh heads, seeded by the recipe."""
    folder = find_encoder(recipe.model.encoder)
    generator = torch.Generator().manual_seed(recipe.seed)
    encoder, _ = load_folder(start or folder, dropout=recipe.model.encoder_dropout, generator=generator)
    manifest = Manifest(recipe.tasks, recipe.model, recipe=recipe.name, data=recipe.data)
    model = build_model(manifest, encoder, generator=generator)
    for task in recipe.tasks:
        if task.is_masked:
            load_vocabulary(folder, model.heads[task.name])
    return Tokenizer.load(folder), model.to(device), manifest


def masked_layers(recipe: Recipe) -> dict[str, str]:
    """Where the prediction layer of each masked task comes from: the encoder's file ("published"), or "fresh"."""
    masked = [task.name for task in recipe.tasks if task.is_masked]
    if not masked:
        return {}
    return dict.fromkeys(masked, "published" if has_vocabulary(find_encoder(recipe.model.encoder)) else "fresh")


def prepare(
    recipe: Recipe,
    tokenizer: Tokenizer,
    folder: Path,
    splits: tuple[str, ...] = ("train", "dev"),
    *,
    cache: TokenCache | None = None,
    watcher: Preparing | None = None,
    nearest: Nearest | None = None,
) -> Prepared:
    """Read and tokenize the splits of every task; what the cache holds is not tokenized again.

    `nearest` finds hard negatives, for tasks that ask for them.
    """
    watcher = watcher or Unwatched()
    examples: dict[str, dict[str, Examples]] = {}
    inputs: dict[str, dict[str, Inputs]] = {}
    started, rows = time.perf_counter(), 0
    for split in splits:
        for place, task in enumerate(recipe.tasks):
            if split == "train" and not task.trained and not task.train:
                continue
            if not getattr(task, split):
                raise MinbertError(f"[tasks.{task.name}] has no {split} files; expected them")
            watcher.preparing(f"reading {task.name} {split}")
            if split == "train":
                found = training_rows(recipe, task, folder, nearest=nearest)
            else:
                found = read_split(task, split, folder)  # type: ignore[arg-type]
            watcher.preparing(f"tokenizing {task.name} {split}, {len(found):,} rows")
            limit, seeds = recipe.model.max_tokens, {"seed": recipe.seed, "place": place}
            weights = pooling_weights(recipe, task)
            tokens = tokenize(task, found, tokenizer, limit, cache=cache, weights=weights, **seeds)
            examples.setdefault(split, {})[task.name] = found
            inputs.setdefault(split, {})[task.name] = tokens
            rows += len(found)
    tried = cache.hits + cache.misses if cache else 0
    from_cache = f", {cache.hits} of {tried} sets of tokens from the cache" if cache and tried else ""
    watcher.prepared(f"{rows:,} rows prepared in {time.perf_counter() - started:.1f} s{from_cache}")
    return Prepared(examples, inputs)


def pooling_weights(recipe: Recipe, task: Task) -> Mapping[str, float] | None:
    """By part of speech, where the task pools with them."""
    return recipe.model.pooling_weights if (task.pooling or recipe.model.pooling) == "weighted" else None


def evaluate_model(
    folder: str | Path,
    recipe: Recipe | None = None,
    *,
    data: str | Path | None = None,
    device: str = "auto",
    precision: Precision = "fp32",
    samples: int = 1000,
    watcher: Preparing | None = None,
) -> dict[str, Evaluation]:
    """Score a model folder on dev: of its own tasks, or of those a recipe describes (other files, same heads)."""
    set_threads()
    if choose_backend(precision, None, device) == "torch":
        device = str(choose_device(device))
    predictor = Predictor.load(folder, device=device, precision=precision)
    rng = np.random.default_rng(Recipe.seed)
    return {
        name: evaluate_task(
            predictor.tasks[name],
            labels,
            outputs,
            rng=rng,
            decision=predictor.manifest.decisions.get(name),
            samples=samples,
        )
        for name, (labels, outputs) in dev_outputs(predictor, recipe, data=data, watcher=watcher).items()
    }


def dev_outputs(
    predictor: Predictor,
    recipe: Recipe | None = None,
    *,
    data: str | Path | None = None,
    watcher: Preparing | None = None,
) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float32]]]:
    """The labels of each task's dev rows, and what the model says of them; for the recipe see `evaluate_model`."""
    watcher = watcher or Unwatched()
    known, manifest = predictor.tasks, predictor.manifest
    tasks = [_with_files_of(known, task) for task in recipe.tasks] if recipe else list(manifest.tasks)
    base = Recipe(tuple(tasks), data=recipe.data if recipe else manifest.data, model=manifest.model)
    cache = TokenCache.from_environment(watcher.warn)
    prepared = prepare(base, predictor.tokenizer, data_folder(base, data), ("dev",), cache=cache, watcher=watcher)
    return {
        name: (labels_of(inputs), predictor.outputs_of(inputs, prepared.examples["dev"][name]))
        for name, inputs in prepared.inputs["dev"].items()
    }


def _with_files_of(known: Mapping[str, Task], other: Task) -> Task:
    """The model's own task, reading the files and columns that another row of its name gives."""
    if other.name not in known:
        raise MinbertError(f'the model has no task "{other.name}"; it has: {", ".join(known)}')
    read = ("dev", "id", "text", "text2", "text3", "label", "normalise")
    return replace(known[other.name], **{name: getattr(other, name) for name in read})


def check_run(folder: Path, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
    """May this run write into the folder?"""
    path = folder / "recipe.toml"
    if not path.exists():
        return
    if resume:
        changed = differences(recipe, read_recipe(path))
        if changed:
            raise MinbertError(f"{shown(folder)} was started with another recipe: {'; '.join(changed)}")
    elif not overwrite:
        raise MinbertError(f"{shown(folder)} holds a run already; --resume goes on with it, --out names another folder")


def check_same_files(folder: Path, prepared: Prepared) -> None:
    """data.json remembers what was read; a run goes on only with the same bytes."""
    path = folder / "data.json"
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for split, tasks in prepared.notes().items():
        for task, note in tasks.items():
            if list(note["files"].values()) != list(before[split][task]["files"].values()):
                raise MinbertError(f"{', '.join(note['files'])} ({task}, {split}) changed since the run was started")
            if note.get("sha256") != before[split][task].get("sha256"):
                raise MinbertError(
                    f"{task}, {split}: the rows drawn ({', '.join(note.get('added', {}))}) are others than those the run "
                    "was started with; expected the same encoder, on the same device"
                )


def _open(folder: Path, recipe: Recipe, prepared: Prepared, *, overwrite: bool) -> None:
    try:
        open_run(folder, recipe, prepared, overwrite=overwrite)
    except OSError as error:
        raise MinbertError(f"{shown(folder)}: cannot be written ({error.strerror}); expected room for a run") from error


def open_run(folder: Path, recipe: Recipe, prepared: Prepared, *, overwrite: bool) -> None:
    """Only now, when recipe, encoder and data were found good, is an older run replaced or a new one begun."""
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for name in ("checkpoints", "model", "models", "predictions", "tensorboard", "stages"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for member in (folder / "runs").glob("*/recipe.toml"):
            if member.parent.name.isdigit():  # an ensemble's, by seed
                shutil.rmtree(member.parent, ignore_errors=True)
        for name in ("results.json", "metrics.jsonl", "data.json"):
            (folder / name).unlink(missing_ok=True)
    write_text(folder / "recipe.toml", to_toml(recipe))
    write_json(folder / "data.json", prepared.notes())


def _changed_files(prepared: Prepared) -> list[str]:
    files = {
        name: digest
        for tasks in prepared.examples.values()
        for found in tasks.values()
        for name, digest in found.files.items()
    }
    return [name for name, digest in files.items() if not Path(name).exists() or fingerprint(Path(name)) != digest]


def train_sample_of(train_inputs: Mapping[str, Inputs], recipe: Recipe) -> dict[str, Inputs]:
    """The fixed training rows that are scored beside dev."""
    size = recipe.training.train_sample
    if not size:
        return {}
    rng = np.random.default_rng([recipe.seed, 3])
    return {name: inputs.take(np.sort(rng.permutation(len(inputs))[:size])) for name, inputs in train_inputs.items()}


def _done(trainer: Trainer) -> dict[str, Any]:
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
    rng = np.random.default_rng([recipe.seed, 4])
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
            seen[task.name] = evaluate_task(task, labels_of(rows), answer(rows), rng=rng, samples=200)
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
        "recipe": as_dict(recipe),
    }
    scored = {"overall": results["overall"], "dev": results["dev"]}
    manifest = read_manifest(folder / "model")
    update_manifest(folder / "model", replace(manifest, decisions=decisions, scores=scored))
    write_json(folder / "results.json", results)
    return results


def _geometries(
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
