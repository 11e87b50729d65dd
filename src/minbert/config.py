"""A recipe: what to train, on what, how. Frozen dataclasses, read from TOML; an unknown key is an error.

    recipe = read_recipe("recipes/multitask.toml", sets=["training.epochs=3"])

A recipe file holds only what differs from the defaults below. Each setting is documented once, under its field.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from minbert.errors import MinbertError, shown, suggest
from minbert.tasks import BUILT_IN, CONTRASTIVE, Kind, PartOfSpeech, PoolingName, Task, check_class, check_task

EMBEDDED = "embedded"
SEVERAL = ("all", "mixed")  # the samplers whose steps have several tasks
SAMPLE = Path(__file__).parent / "data" / "sample"


@dataclass(frozen=True)
class ModelConfig:
    encoder: str = "minilm"
    """A cached name, a hub id, or a folder in Hugging Face layout."""
    pooling: PoolingName = "cls"
    """How a sequence becomes one vector: cls, pooler, mean, max or weighted (the mean, each token with the weight of its
    word's part of speech; needs the extra "pos", and is not for ONNX Runtime)."""
    pooling_weights: dict[str, float] = field(default_factory=dict)
    """For weighted: verb, auxiliary, noun, adjective, adverb, function (pronouns, prepositions, articles and the like) and
    other (punctuation, numbers, special tokens), for example { verb = 2, auxiliary = 0.5 }; what is not named has 1."""
    dropout: float = 0.1
    """In the heads."""
    encoder_dropout: float | None = None
    """In the encoder; without it the published one."""
    common_layer: bool = False
    """A linear layer + tanh that all tasks share, first in every head."""
    common_dropout: float = 0.0
    common_tasks: tuple[str, ...] = ()
    """The tasks that go through the common layer; empty: all."""
    max_tokens: int = 256
    """Longer inputs are cut, and counted."""


@dataclass(frozen=True)
class SamplerConfig:
    kind: Literal[
        "sequential", "round-robin", "proportional", "uniform", "power", "annealed", "weighted", "all", "mixed"
    ] = "proportional"
    """Which task comes next; see data/samplers.py."""
    order: tuple[str, ...] = ()
    """For sequential and round-robin: the tasks in order; one may be named twice. Empty: as the recipe lists them."""
    unit: Literal["dataset", "batch"] = "dataset"
    """For round-robin: whole datasets in turn, or one batch of each."""
    alpha: float = 0.5
    """For power: a task's share is its size to this power (1 proportional, 0 uniform)."""
    weights: dict[str, float] = field(default_factory=dict)
    """For weighted: each task's share, for example quora = 2; what is not named has 1."""
    epoch: Literal["all", "largest"] = "all"
    """For the kinds that draw: an epoch has as many steps as all tasks have batches, or as the largest has."""
    steps_per_epoch: int = 0
    """For the kinds that draw: so many steps instead."""


@dataclass(frozen=True)
class OptimizerConfig:
    kind: Literal["adamw", "radam"] = "adamw"
    lr: float = 2e-5
    """Peak learning rate of the encoder's top layer."""
    head_lr: float | None = None
    """Of the heads; without it the same."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    """Not on biases and LayerNorm."""
    bias_correction: Literal["torch", "course", "none"] = "torch"
    layer_decay: float = 1.0
    """Each layer further down learns slower by this factor."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """After warm-up: stay, or fall to 0 at the end along a line or half a cosine."""
    warmup: float = 0.06
    """Part of the steps in which the rate grows from 0."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 leaves it alone."""


@dataclass(frozen=True)
class TrainingConfig:
    epochs: int = 3
    batch_size: int = 32
    """Rows of a batch, at most."""
    batch_tokens: int = 0
    """Tokens of a batch, padding counted, at most; 0: only the rows count."""
    accumulate: int = 1
    """Batches whose gradients are added before a step of the optimizer."""
    cache_rows: int = 0
    """Of a batch with a contrastive loss, rows that are encoded at a time, so that memory does not limit the batch
    (GradCache; costs a second forward pass); 0: all of them at once."""
    mode: Literal["finetune", "pretrain", "unfreeze"] = "finetune"
    """Train everything; only the heads, the encoder frozen; or one more layer each epoch, from the top."""
    loss_weighting: Literal["sum", "mean", "uncertainty"] = "sum"
    """How the losses of one step become one number; each task's `weight` is a factor before that."""
    gradients: Literal["sum", "pcgrad", "gradvac", "cagrad"] = "sum"
    """How the tasks' gradients become one; see training/gradients.py. All but sum need the sampler all or mixed, and run
    the encoder once for each task of a step. With loss_weighting = "mean" they are the mean of what is left of each."""
    gradvac_beta: float = 0.01
    """For gradvac: how fast the angles it aims at follow those it sees."""
    cagrad_c: float = 0.5
    """For cagrad: how far it may go from the mean gradient, in lengths of that."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, which is then what is evaluated and kept; 0: none."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Of matrix products. auto: fp32 on a CPU; on a GPU bf16, or fp16 where it has no bf16."""
    kernels: Literal["auto", "plain"] = "auto"
    """auto: on a GPU, kernels of our own and steps as CUDA graphs, where they can be used; plain: torch's own."""
    evaluate_every: int = 0
    """Steps between evaluations; 0: at the end of each epoch."""
    max_steps: int = 0
    """At most so many steps: a longer run is thinned evenly, each epoch and each task keeps its share; 0: all."""
    train_sample: int = 1000
    """Training rows of each task that are scored beside dev, to show the gap; 0: none."""
    best: Literal["mean", "weighted-mean", "any-improves", "task", "per-task", "last"] = "mean"
    """When a checkpoint is the best so far; with last, each is: the model of the last evaluation is the one kept."""
    best_task: str = ""
    """For best = "task": which."""
    best_weights: dict[str, float] = field(default_factory=dict)
    """For best = "weighted-mean": factors; what is not named has 1."""
    patience: int = 0
    """Stop after so many evaluations without a better aggregate; 0: never."""
    checkpoint_every: int = 0
    """Steps between checkpoints to resume from; 0: at evaluations only."""
    keep: int = 2
    """Checkpoints kept beside the best model."""
    log_every: int = 20
    """Steps between lines of metrics.jsonl."""
    snapshots: int = 0
    """Models kept in models/step-NUMBER beside the chosen one: those of so many evaluations with the best aggregates."""


@dataclass(frozen=True)
class EnsembleConfig:
    runs: int = 1
    """Trainings of the recipe, with the seeds seed, seed + 1, ..."""
    models: int = 0
    """The best so many snapshots of all of them, by their aggregates on dev, are the model; 0: no ensemble. Where
    training.snapshots is 0, each run keeps as many as this."""


@dataclass(frozen=True)
class PaperConfig:
    """What a paper reports for the row that a recipe stands for. A number that it does not print is left out."""

    row: str = ""
    """What the paper calls it; empty: the recipe stands for no paper's row."""
    after: str = ""
    """The recipe of the row it was built on, "hillebrand/3-cosine-similarity"; empty: a first one."""
    dev: dict[str, float] = field(default_factory=dict)
    """Scores by task, as printed."""
    test: dict[str, float] = field(default_factory=dict)
    train: dict[str, float] = field(default_factory=dict)
    overall: dict[str, float] = field(default_factory=dict)
    """By split."""
    rule: Literal["2023", "2024"] = "2023"
    """How the overall score is made: the plain mean, or with a correlation r as (r + 1) / 2."""
    note: str = ""
    """Deviations, misprints, and what was guessed because the paper is silent."""


@dataclass(frozen=True)
class Recipe:
    tasks: tuple[Task, ...]
    name: str = "recipe"
    about: str = ""
    data: str = ""
    """Folder of the files; "embedded" is the sample inside the package. --data and MINBERT_DATA say otherwise."""
    seed: int = 1
    model: ModelConfig = ModelConfig()
    sampler: SamplerConfig = SamplerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    stages: tuple[Recipe, ...] = ()
    """What to train before, one after the other, each with its own tasks, sampler, optimizer and training: [[stages]]. A
    stage hands its encoder to the next, and the last of them to the recipe's own tasks; heads start fresh. Its name is
    how --set reaches it: stages.NAME.training.epochs=1."""
    ensemble: EnsembleConfig = EnsembleConfig()
    paper: PaperConfig = PaperConfig()

    def __post_init__(self) -> None:
        """Stages have the seed, the data and the encoder of the whole, also where those were replaced."""
        if self.stages:
            stages = (
                replace(stage, data=self.data, seed=self.seed, model=replace(stage.model, encoder=self.model.encoder))
                for stage in self.stages
            )
            object.__setattr__(self, "stages", tuple(stages))

    @property
    def weighted(self) -> bool:
        """Does a task pool with weights?"""
        return "weighted" in (task.pooling or self.model.pooling for task in self.tasks)

    @property
    def trained(self) -> tuple[Task, ...]:
        """The tasks that steps are made of."""
        return tuple(task for task in self.tasks if task.trained)

    def task(self, name: str) -> Task:
        for task in self.tasks:
            if task.name == name:
                return task
        names = [task.name for task in self.tasks]
        raise MinbertError(f'no task "{name}"{suggest(name, names)}; this recipe has: {", ".join(names)}')


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
    "training.cagrad_c": (0, 10),
    "training.ema": (0, 0.999999),
    "training.evaluate_every": (0, math.inf),
    "training.max_steps": (0, math.inf),
    "training.train_sample": (0, math.inf),
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


def read_recipe(path: str | Path, *, sets: Iterable[str] = (), seed: int | None = None) -> Recipe:
    """A recipe file, changed by `key=value` settings such as `optimizer.lr=1e-5` or `tasks.sst.head=mlp`.

    `base = "common.toml"` names another file beside it, of which the recipe holds only what differs.
    """
    path = Path(path)
    raw = _read(path, ())
    raw.setdefault("name", path.stem)
    for setting in sets:
        _apply(raw, setting)
    if seed is not None:
        raw["seed"] = seed
    return parse_recipe(raw, shown(path))


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MinbertError(f"{shown(path)}: no such recipe") from None
    except (ValueError, OSError) as error:  # ValueError: no TOML, no UTF-8, or a number beyond Python's limit
        raise MinbertError(f"{shown(path)}: not a TOML file ({error})") from None


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """A recipe's tables over those of its base, and of that one's; what they are called and stand for stays theirs."""
    if path.resolve() in above:
        raise MinbertError(f"{shown(path)}: is the base of its own base; expected an end")
    raw = read_toml(path)
    base = raw.pop("base", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise MinbertError(f'{shown(path)}: base is {base!r}; expected a file beside it, such as "common.toml"')
    under = _read(path.parent / base, (*above, path.resolve()))
    return _merged({key: value for key, value in under.items() if key not in ("name", "about", "paper")}, raw)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged, everything else is replaced. What is below keeps its place: tasks have an order."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def parse_recipe(raw: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """A recipe from what TOML (or a dictionary of the same shape) says; checked as a whole."""
    table = dict(raw)
    rows = table.pop("tasks", None)
    if not isinstance(rows, Mapping) or not rows:
        raise MinbertError(f"{where}: no tasks; expected a table such as [tasks.sst]")
    tasks = tuple(check_task(_task(name, row, where)) for name, row in rows.items())
    stages = _stages(table.pop("stages", ()), table.get("model", {}), where)
    recipe: Recipe = _build(Recipe, table, where, tasks=tasks, stages=stages)
    _check(recipe, where)
    return recipe


STAGE_KEYS = ("name", "about", "tasks", "model", "sampler", "optimizer", "training")


def _stages(raw: Any, model: Any, where: str) -> tuple[Recipe, ...]:
    """The recipes of [[stages]], each over the whole's model table."""
    if not isinstance(raw, list | tuple) or not all(isinstance(stage, Mapping) for stage in raw):
        raise MinbertError(f"{where}: stages is {raw!r:.60}; expected tables, each [[stages]]")
    stages: list[Recipe] = []
    for number, given in enumerate(raw, start=1):
        stage = {"name": f"stage-{number}", **given}
        name = stage["name"]
        if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
            raise MinbertError(f"{where}: a stage is named {name!r}; expected letters, digits, - and _")
        if name in [other.name for other in stages]:
            raise MinbertError(f'{where}: two stages are named "{name}"; expected different names')
        spot = f'{where}: stage "{name}"'
        for key in stage:
            if key == "stages":
                raise MinbertError(f"{spot} has stages of its own; expected them one after the other")
            if key not in STAGE_KEYS:
                near = " (it is the whole recipe's)" if hasattr(Recipe, key) else suggest(key, STAGE_KEYS)
                raise MinbertError(f'{spot}: unknown key "{key}"{near}; a stage has: {", ".join(STAGE_KEYS)}')
        own = stage.get("model", {})
        if isinstance(own, Mapping) and isinstance(model, Mapping):
            if "encoder" in own:
                raise MinbertError(f"{spot}: model.encoder is {own['encoder']!r}; a stage trains the recipe's own")
            stage["model"] = {**model, **own}
        stages.append(parse_recipe(stage, spot))
    return tuple(stages)


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


def data_folder(recipe: Recipe, chosen: str | Path | None = None) -> Path:
    """Where the recipe's files lie: what the caller chose, the embedded sample, MINBERT_DATA, or the recipe's own."""
    if chosen is not None:
        return SAMPLE if str(chosen) == EMBEDDED else Path(chosen)
    if recipe.data == EMBEDDED:
        return SAMPLE
    return Path(os.environ.get("MINBERT_DATA") or recipe.data or "data")


def to_toml(recipe: Recipe) -> str:
    """The whole recipe, defaults included, in the form that `read_recipe` takes."""
    lines = _lines(recipe, [item.name for item in fields(Recipe)])
    for stage in recipe.stages:
        lines += ["", "[[stages]]", *_lines(stage, STAGE_KEYS, "stages.")]
    return "\n".join(lines) + "\n"


def _lines(recipe: Recipe, keys: Iterable[str], prefix: str = "") -> list[str]:
    """The lines of a recipe, or of a stage, whose model has no encoder of its own."""
    lines = []
    tables: list[tuple[str, Any]] = []
    for key in keys:
        value = getattr(recipe, key)
        if key == "tasks":
            tables += [(f"tasks.{_key(task.name)}", task) for task in value]
        elif dataclasses.is_dataclass(value):
            if value != PaperConfig():
                tables.append((key, value))
        elif key != "stages":
            lines.append(f"{key} = {_toml(value)}")
    for name, table in tables:
        left_out = "name" if name.startswith("tasks.") else "encoder" if prefix and name == "model" else ""
        lines += ["", f"[{prefix}{name}]"]
        for item in fields(table):
            value = getattr(table, item.name)
            if value is not None and item.name != left_out:
                lines.append(f"{item.name} = {_toml(value)}")
    return lines


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe as plain data, in the shape of its TOML."""
    return tomllib.loads(to_toml(recipe))


def differences(one: Recipe, other: Recipe) -> list[str]:
    """What differs, a line each: `optimizer.lr: 2e-05, was 1e-05`. What a paper reports changes no run."""
    left, right = (_flat(as_dict(replace(recipe, paper=PaperConfig()))) for recipe in (one, other))
    missing = object()
    lines = [
        f"{key}: {left.get(key, 'nothing')}, was {right.get(key, 'nothing')}"
        for key in sorted({*left, *right})
        if left.get(key, missing) != right.get(key, missing)
    ]
    lines += _moved("tasks", one.tasks, other.tasks)  # heads and random streams go by a task's place
    lines += _moved("stages", one.stages, other.stages)
    before = {stage.name: stage for stage in other.stages}
    for stage in one.stages:
        if stage.name in before:
            lines += _moved(f"tasks of {stage.name}", stage.tasks, before[stage.name].tasks)
    return lines


def _moved(what: str, one: Iterable[Task | Recipe], other: Iterable[Task | Recipe]) -> list[str]:
    new, old = ([item.name for item in items] for items in (one, other))
    same = new == old or set(new) != set(old)
    return [] if same else [f"order of {what}: {', '.join(new)}, was {', '.join(old)}"]


def _check(recipe: Recipe, where: str) -> None:
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
    if training.best == "weighted-mean" and not any(training.best_weights.get(name, 1) for name in names):
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
        if training.loss_weighting == "uncertainty" and task.loss == "info-nce-printed":
            raise MinbertError(
                f'{where}: training.loss_weighting is "uncertainty", and the loss of {task.name}, "{task.loss}", can be '
                'negative, where a learned weight has no bound; expected "sum" or "mean", or the loss "info-nce"'
            )


def _check_ensemble(recipe: Recipe, where: str) -> None:
    runs, models, training = recipe.ensemble.runs, recipe.ensemble.models, recipe.training
    if runs > 1 and not models:
        raise MinbertError(f"{where}: ensemble.runs is {runs} and ensemble.models 0; expected 1 or more models")
    most = min(training.snapshots or models, models if training.evaluate_every else training.epochs)  # of each run
    if models > runs * most:
        raise MinbertError(
            f"{where}: ensemble.models is {models}; {runs} runs keep {runs * most} snapshots at most: "
            "expected fewer models, or more runs, epochs or training.snapshots"
        )


def _numbers(key: str, value: Any) -> list[tuple[str, float]]:
    """The numbers of a setting, each with where it stands: one or none, or those of a list or a table."""
    if isinstance(value, dict):
        return [(f"{key}.{name}", number) for name, number in value.items()]
    return [(key, number) for number in (value if isinstance(value, tuple) else [value]) if number is not None]


def _task(name: str, row: Any, where: str) -> Task:
    """A row of the recipe over the built-in it is like: the one of its name, or the one that `like` names."""
    if not isinstance(row, Mapping):
        raise MinbertError(f"{where}: tasks.{name} is {row!r}; expected a table, [tasks.{name}]")
    row = dict(row)
    like = row.pop("like", name)
    spot = f"{where}: [tasks.{name}]"
    no_labels = row.get("kind") in ("contrastive", "masked")  # which have their texts alone
    if row.get("kind") == "contrastive":
        row.setdefault("head", "cosine")
    if like not in BUILT_IN:
        if like != name:
            raise MinbertError(f'{spot} like is "{like}"{suggest(like, BUILT_IN)}; built in: {", ".join(BUILT_IN)}')
        if "kind" not in row:
            raise MinbertError(
                f"{spot} has no kind and is not built in{suggest(name, BUILT_IN)}; "
                f"expected kind to be one of: {', '.join(get_args(Kind))}"
            )
        return _build(Task, row, spot, name=name)
    known = {item.name: getattr(BUILT_IN[like], item.name) for item in fields(Task)}
    changed = _build(Task, {"kind": BUILT_IN[like].kind, **row}, spot, name=name)
    own = {"name", *row, *(("kind", "label", "classes") if no_labels else ())}
    return replace(changed, **{key: value for key, value in known.items() if key not in own})


def from_table(cls: Any, raw: Mapping[str, Any], where: str) -> Any:
    """A dataclass of plain fields from a TOML table, checked as a recipe's tables are."""
    needed = {item.name for item in fields(cls) if item.default is item.default_factory is dataclasses.MISSING}
    if missing := sorted(needed - set(raw)):
        raise MinbertError(f"{where}: no {', '.join(missing)}; expected {'it' if len(missing) == 1 else 'them'}")
    return _build(cls, raw, where)


def _build(cls: Any, raw: Mapping[str, Any], where: str, **given: Any) -> Any:
    """A dataclass from a table, each value checked against its field's type; an unknown key suggests a near one."""
    hints = get_type_hints(cls)
    known = {item.name for item in fields(cls)} - set(given)
    values = dict(given)
    for key, value in raw.items():
        if key not in known:
            raise MinbertError(f'{where}: unknown key "{key}"{suggest(key, known)}; known: {", ".join(sorted(known))}')
        values[key] = _convert(value, hints[key], f"{where}: {key}")
    needed = [item.name for item in fields(cls) if item.default is item.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in values]:
        raise MinbertError(f"{where}: no {', '.join(missing)}; expected {'it' if len(missing) == 1 else 'them'}")
    return cls(**values)


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert(value, next(argument for argument in arguments if argument is not type(None)), where)
    if origin is Literal:
        if value not in arguments:
            near = suggest(value, arguments) if isinstance(value, str) else ""
            raise MinbertError(f'{where} is "{value}"{near}; expected one of: {", ".join(map(str, arguments))}')
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        if arguments[-1] is not Ellipsis and len(items) != len(arguments):
            raise MinbertError(f"{where} has {len(items)} values; expected {len(arguments)}")
        return tuple(_convert(item, arguments[0], where) for item in items)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise MinbertError(f"{where} is {value!r}; expected a table")
        return {str(key): _convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise MinbertError(f"{where} is {value!r}; expected a table")
        return _build(hint, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf  # float() of a longer one is an OverflowError
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise MinbertError(f"{where} is {value!r}; expected {_article(hint)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise MinbertError(f"{where} is {value}; expected a finite number")
    return value


def _article(hint: Any) -> str:
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(hint, str(hint))


def _apply(raw: dict[str, Any], setting: str) -> None:
    """Change one value of the raw table: `optimizer.lr=1e-5`. A value that is not TOML is taken as text."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise MinbertError(f'--set {setting}: expected key=value, for example "training.epochs=3"')
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *path, last = key.strip().split(".")
    table: Any = raw
    for part in path:
        table = _stage_table(table, part, setting) if isinstance(table, list) else table.setdefault(part, {})
        if not isinstance(table, dict | list):
            raise MinbertError(f"--set {setting}: {part} is not a table")
    if isinstance(table, list):
        _stage_table(table, last, setting)
        raise MinbertError(f"--set {setting}: {last} is a stage; expected one of its settings, as in {key}.name=...")
    table[last] = value


def _stage_table(stages: list[Any], name: str, setting: str) -> Any:
    """The table of the stage of this name."""
    tables = {stage.get("name", f"stage-{n}"): stage for n, stage in enumerate(stages, 1) if isinstance(stage, dict)}
    if name not in tables:
        names = ", ".join(map(str, tables))
        raise MinbertError(
            f'--set {setting}: no stage "{name}"{suggest(name, map(str, tables))}; the stages are: {names}'
        )
    return tables[name]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if key == "stages" and isinstance(value, list):  # a task may have that name
            value = {stage["name"]: stage for stage in value}
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # Only this one TOML wants escaped and JSON not; and TOML knows no surrogates, JSON's way to escape an emoji
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if dataclasses.is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)
