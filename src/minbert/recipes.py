"""Recipe files: read, with their bases, stages and changed settings; and written.

    recipe = read_recipe("recipes/multitask.toml", sets=["training.epochs=3"])

A recipe file holds only what differs from the defaults in `config.py`.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol, get_args

from minbert.atomic import write_text
from minbert.config import EnsembleConfig, ModelConfig, PaperConfig, Recipe
from minbert.encoders import last_part
from minbert.errors import MinbertError, shown, suggest
from minbert.recipe_checks import check_recipe
from minbert.task_checks import check_task
from minbert.tasks import BUILT_IN, REVISIONS, Kind, Task
from minbert.toml_tables import build, flat, read_toml, toml_key, toml_value

LOOK_AHEAD = ("sequential", "annealed")  # samplers whose first epochs are others when more are to come
APART = 1_000  # between the seeds of an ensemble's runs: ensembles of the seeds 1, 2, 3 are to have no run in common
STAGE_KEYS = ("name", "about", "tasks", "model", "sampler", "optimizer", "training")

STARTED, BEGUN = "recipe.toml", "begun.json"
"""Files of a run's folder: the recipe it was started with, resolved; and what a recipe does not say of that."""


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


def as_recipe(recipe: Recipe | str | Path | Mapping[str, Any]) -> Recipe:
    """A recipe, a file of one, or a dictionary of the same shape."""
    if isinstance(recipe, Recipe):
        return recipe
    return parse_recipe(recipe) if isinstance(recipe, Mapping) else read_recipe(recipe)


def parse_recipe(raw: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """A recipe from what TOML (or a dictionary of the same shape) says; checked as a whole."""
    table = dict(raw)
    rows = table.pop("tasks", None)
    if not isinstance(rows, Mapping) or not rows:
        raise MinbertError(f"{where}: no tasks; expected a table such as [tasks.sst]")
    tasks = tuple(_task(name, row, where) for name, row in rows.items())
    stages = _stages(table.pop("stages", ()), table.get("model", {}), where)
    recipe: Recipe = build(Recipe, table, where, tasks=tasks, stages=stages)
    check_recipe(recipe, where)
    return recipe


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


def _task(name: str, row: Any, where: str) -> Task:
    """A row of the recipe over the built-in it is like: the one of its name, or the one that `like` names."""
    if not isinstance(row, Mapping):
        raise MinbertError(f"{where}: tasks.{name} is {row!r}; expected a table, [tasks.{name}]")
    row = dict(row)
    like = row.pop("like", name)
    spot = f"{where}: [tasks.{name}]"
    contrastive = row.get("kind") == "contrastive"
    if contrastive:
        row.setdefault("head", "cosine")
    if like not in BUILT_IN:
        if like != name:
            raise MinbertError(f'{spot} like is "{like}"{suggest(like, BUILT_IN)}; built in: {", ".join(BUILT_IN)}')
        if "kind" not in row:
            raise MinbertError(
                f"{spot} has no kind and is not built in{suggest(name, BUILT_IN)}; "
                f"expected kind to be one of: {', '.join(get_args(Kind))}"
            )
        return _checked(build(Task, row, spot, name=name), where)
    known = {item.name: getattr(BUILT_IN[like], item.name) for item in fields(Task)}
    changed = build(Task, {"kind": BUILT_IN[like].kind, **row}, spot, name=name)
    own = {"name", *row}
    if row.get("kind") == "masked" or (contrastive and "only" not in row):  # which says by its label which rows to read
        own |= {"kind", "label", "classes"}
    return _checked(replace(changed, **{key: value for key, value in known.items() if key not in own}), where)


def _checked(task: Task, where: str) -> Task:
    try:
        return check_task(task)
    except MinbertError as error:
        raise MinbertError(f"{where}: {error}") from None


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
            tables += [(f"tasks.{toml_key(task.name)}", task) for task in value]
        elif dataclasses.is_dataclass(value):
            if value != PaperConfig():
                tables.append((key, value))
        elif key != "stages":
            lines.append(f"{key} = {toml_value(value)}")
    for name, table in tables:
        left_out = "name" if name.startswith("tasks.") else "encoder" if prefix and name == "model" else ""
        lines += ["", f"[{prefix}{name}]"]
        for item in fields(table):
            value = getattr(table, item.name)
            if value is not None and item.name != left_out:
                lines.append(f"{item.name} = {toml_value(value)}")
    return lines


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe as plain data, in the shape of its TOML."""
    return tomllib.loads(to_toml(recipe))


def differences(one: Recipe, other: Recipe) -> list[str]:
    """What differs, a line each: `optimizer.lr: 2e-05, was 1e-05`. What a paper reports, and what is said about a recipe and its
    stages, changes no run."""
    left, right = (flat(as_dict(_untold(recipe))) for recipe in (one, other))
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


def _untold(recipe: Recipe) -> Recipe:
    stages = tuple(replace(stage, about="") for stage in recipe.stages)
    return replace(recipe, about="", paper=PaperConfig(), stages=stages)


def members_of(recipe: Recipe) -> list[Recipe]:
    """The recipes of an ensemble's runs: the same but for the seed, with snapshots to choose from. The first has the
    ensemble's own seed: it is what the recipe trains alone."""
    training = replace(recipe.training, snapshots=recipe.training.snapshots or recipe.ensemble.models)
    return [
        replace(recipe, seed=recipe.seed + APART * number, training=training, ensemble=EnsembleConfig())
        for number in range(recipe.ensemble.runs)
    ]


class Built(Protocol):
    """What says which parts a model is built of: a recipe, a stage, a model's manifest."""

    @property
    def tasks(self) -> tuple[Task, ...]: ...
    @property
    def model(self) -> ModelConfig: ...


def revisions(*parts: Built) -> dict[str, int]:
    """Of what they are built of, or trained with, and once was another: which it is now."""
    used = {task.head for part in parts for task in part.tasks}
    used |= {"common layer" for part in parts if part.model.common_layer}
    used |= {f"sampler {part.sampler.kind}" for part in parts if isinstance(part, Recipe)}
    return {name: number for name, number in REVISIONS.items() if name in used}


def revised(recipe: Recipe, known: Mapping[str, int]) -> list[str]:
    """What a recipe is built of, its stages too, that is another than when `known` were the revisions."""
    now = revisions(recipe, *recipe.stages).items()
    before = {name: known.get(name, 1) for name, _ in now}
    return [f"{name}: revision {number}, was {before[name]}" for name, number in now if before[name] != number]


def stage_folder(run: Path, number: int, stage: Recipe) -> Path:
    """Where a run keeps its stage of this number, counted from 1."""
    return run / "stages" / f"{number}-{stage.name}"


def write_started(folder: Path, recipe: Recipe, weights: str) -> None:
    """What a run is started with: its recipe, the revisions of its parts, and the digest of its encoder's weights."""
    begun = {"revisions": revisions(recipe, *recipe.stages), "encoder_weights": weights}
    write_text(folder / BEGUN, json.dumps(begun) + "\n")
    write_text(folder / STARTED, to_toml(recipe))


def started_otherwise(folder: Path, recipe: Recipe, weights: str | None) -> list[str]:
    """In what the run in a folder is not one of this recipe and, where they are known, of these weights. One of fewer epochs
    that can go on is one."""
    before = read_recipe(folder / STARTED)
    try:
        known = dict(json.loads((folder / BEGUN).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        known = {}
    found = [] if begins(before, recipe) else differences(recipe, before)
    found += revised(recipe, known.get("revisions", {}))
    return found + (other_encoder(recipe, known, weights) if before.model.encoder == recipe.model.encoder else [])


def other_encoder(recipe: Recipe, known: Mapping[str, Any], weights: str | None) -> list[str]:
    """Whether the encoder of a run, or of its results, had other weights than the one of its name has now. Where either is
    not known, nothing is said."""
    before = known.get("encoder_weights")
    return (
        [f"another encoder is called {last_part(recipe.model.encoder)} now"]
        if before and weights not in (None, before)
        else []
    )


def begins(before: Recipe, recipe: Recipe) -> bool:
    """Is a run of `before` the beginning of one of this recipe: the same but for more epochs, and nothing in it depends
    on how many there are?"""
    steady = (
        (recipe.optimizer.schedule, recipe.optimizer.warmup) == ("constant", 0)
        and recipe.sampler.kind not in LOOK_AHEAD
        and not recipe.training.max_steps
        and recipe.training.accumulate == 1  # else the last batches of `before` had an update of their own
        and not recipe.ensemble.models
    )
    fewer = replace(recipe.training, epochs=before.training.epochs)
    same = replace(recipe, name=before.name, training=fewer)
    return steady and recipe.training.epochs > before.training.epochs and not differences(same, before)


def _moved(what: str, one: Iterable[Task | Recipe], other: Iterable[Task | Recipe]) -> list[str]:
    new, old = ([item.name for item in items] for items in (one, other))
    same = new == old or set(new) != set(old)
    return [] if same else [f"order of {what}: {', '.join(new)}, was {', '.join(old)}"]


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
