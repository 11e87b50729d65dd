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
from minbert.tasks import BUILT_IN, PoolingName, Task, check_task

EMBEDDED = "embedded"
SEVERAL = ("all", "mixed")  # the samplers whose steps have several tasks
SAMPLE = Path(__file__).parent / "data" / "sample"


@dataclass(frozen=True)
class ModelConfig:
    encoder: str = "minilm"
    """A cached name, a hub id, or a folder in Hugging Face layout."""
    pooling: PoolingName = "cls"
    """How a sequence becomes one vector: cls, pooler, mean or max."""
    dropout: float = 0.1
    """In the heads."""
    encoder_dropout: float | None = None
    """In the encoder; without it the published one."""
    common_layer: bool = False
    """A linear layer + tanh that all tasks share, first in every head."""
    common_dropout: float = 0.0
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
    best: Literal["mean", "weighted-mean", "any-improves", "task", "per-task"] = "mean"
    """When a checkpoint is the best so far."""
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
    paper: PaperConfig = PaperConfig()

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
    recipe: Recipe = _build(Recipe, table, where, tasks=tasks)
    _check(recipe, where)
    return recipe


def data_folder(recipe: Recipe, chosen: str | Path | None = None) -> Path:
    """Where the recipe's files lie: what the caller chose, the embedded sample, MINBERT_DATA, or the recipe's own."""
    if chosen is not None:
        return SAMPLE if str(chosen) == EMBEDDED else Path(chosen)
    if recipe.data == EMBEDDED:
        return SAMPLE
    return Path(os.environ.get("MINBERT_DATA") or recipe.data or "data")


def to_toml(recipe: Recipe) -> str:
    """The whole recipe, defaults included, in the form that `read_recipe` takes."""
    lines = []
    tables: list[tuple[str, Any]] = []
    for item in fields(Recipe):
        value = getattr(recipe, item.name)
        if item.name == "tasks":
            tables += [(f"tasks.{_key(task.name)}", task) for task in value]
        elif dataclasses.is_dataclass(value):
            if value != PaperConfig():
                tables.append((item.name, value))
        else:
            lines.append(f"{item.name} = {_toml(value)}")
    for name, table in tables:
        lines += ["", f"[{name}]"]
        for item in fields(table):
            value = getattr(table, item.name)
            if value is not None and not (name.startswith("tasks.") and item.name == "name"):
                lines.append(f"{item.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


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
    new, old = ([task.name for task in recipe.tasks] for recipe in (one, other))
    if new != old and set(new) == set(old):  # heads and random streams go by a task's place
        lines.append(f"order of tasks: {', '.join(new)}, was {', '.join(old)}")
    return lines


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
    for key, (low, high) in LIMITS.items():
        for spot, number in _numbers(key, attrgetter(key)(recipe)):
            if not low <= number <= high:
                expected = f"{low} or more" if high == math.inf else f"{low} to {high}"
                raise MinbertError(f"{where}: {spot} is {number}; expected {expected}")
    for task in recipe.tasks:
        if not task.train and not task.dev and not task.test:
            raise MinbertError(f"{where}: [tasks.{task.name}] has no files; expected train and dev")


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
    if like not in BUILT_IN:
        if like != name:
            raise MinbertError(f'{spot} like is "{like}"{suggest(like, BUILT_IN)}; built in: {", ".join(BUILT_IN)}')
        if "kind" not in row:
            raise MinbertError(
                f"{spot} has no kind and is not built in{suggest(name, BUILT_IN)}; "
                'expected kind = "classification", "regression", "pair-classification" or "pair-regression"'
            )
        return _build(Task, row, spot, name=name)
    known = {item.name: getattr(BUILT_IN[like], item.name) for item in fields(Task)}
    changed = _build(Task, {"kind": BUILT_IN[like].kind, **row}, spot, name=name)
    return replace(changed, **{key: value for key, value in known.items() if key not in row and key != "name"})


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
    table = raw
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise MinbertError(f"--set {setting}: {part} is not a table")
    table[last] = value


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
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
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)
