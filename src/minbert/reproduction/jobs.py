"""What is to be run: every (row, seed), and whether it was run already.

    jobs = plan_jobs(papers, rows, seeds=3)
    check_ready(jobs, settings)
    made_otherwise(jobs[0], settings)       # None without a result, [] for one of this very run

A run counts as done if its result is there and was made by the very recipe that would be run now, from the very files, also
where a best row's result is older than the error analysis beside it and has none. A result that was made otherwise may have
taken hours of a GPU: it is made anew only where that was asked for.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from minbert.config import Recipe, TrainingConfig, data_folder
from minbert.encoders import find_encoder, last_part, local_encoder
from minbert.errors import MinbertError, require, shown, suggest
from minbert.preparing import files_of, other_files, pooling_weights, read_notes
from minbert.recipes import (
    STARTED,
    begins,
    differences,
    members_of,
    other_encoder,
    parse_recipe,
    read_recipe,
    revised,
    stage_folder,
    started_otherwise,
)
from minbert.reproduction.recipes import Paper, Row

ASIDE = {name: getattr(TrainingConfig(), name) for name in ("train_sample", "checkpoint_every", "keep", "log_every")}
"""Settings of a training that change no score on dev, what is scored or written beside it and how often; usual values."""


@dataclass(frozen=True)
class Settings:
    """How to run, the same for all."""

    encoder: str
    results: Path = Path("results/reproduction")
    runs: Path = Path("runs/reproduction")
    data: str | None = None
    device: str = "auto"
    jobs: int = 1
    """Processes side by side."""
    sets: tuple[str, ...] = ()
    """Changes of every recipe, as `minbert train --set` takes them."""
    steps_cap: int = 0
    """`training.max_steps` of every run, and of each of its stages; 0: whole runs."""
    budget: float = math.inf
    """Seconds after which nothing is started, and what runs is stopped."""
    keep_models: bool = False
    replace: bool = False
    """Make results anew that were made otherwise."""
    poll: float = 0.3
    """Seconds between looks at the processes."""
    trainer: tuple[str, ...] = (sys.executable, "-m", "minbert", "train")
    """The command that trains a recipe."""

    @property
    def encoder_name(self) -> str:
        return last_part(self.encoder)

    @cached_property
    def encoder_weights(self) -> str | None:
        """What tells one encoder from another of its name; None where it is not on this machine, or cannot be read."""
        from minbert.model.pretrained import weights_digest

        folder = local_encoder(self.encoder)
        try:
            return weights_digest(folder) if folder else None
        except MinbertError:
            return None


@dataclass(frozen=True)
class Job:
    """One training."""

    row: Row
    seed: int

    def result(self, settings: Settings) -> Path:
        return settings.results / settings.encoder_name / self.row.paper / self.row.name / f"seed{self.seed}.json"

    def mistakes(self, settings: Settings) -> Path:
        return self.result(settings).with_name(f"mistakes-seed{self.seed}.json")

    def folder(self, settings: Settings) -> Path:
        return settings.runs / settings.encoder_name / self.row.paper / self.row.name / f"seed{self.seed}"

    def sets(self, settings: Settings) -> list[str]:
        """The settings that are for this row: one of a task that it does not have would give it that task."""
        return [setting for setting in settings.sets if table_of(setting) in (None, *tables_of(self.row))]

    def changes(self, settings: Settings) -> list[str]:
        """What the command line changes in the recipe, the encoder and the cap among it."""
        sets = [f"model.encoder={settings.encoder}", *self.sets(settings)]
        if settings.steps_cap:
            stages = read_recipe(self.row.path, sets=sets).stages
            tables = ["training", *(f"stages.{stage.name}.training" for stage in stages)]
            sets += [f"{table}.max_steps={settings.steps_cap}" for table in tables]
        return sets

    def recipe(self, settings: Settings) -> Recipe:
        return read_recipe(self.row.path, sets=self.changes(settings), seed=self.seed)

    def follows(self, other: Job, settings: Settings) -> bool:
        """Is the other one's run the beginning of this one's?"""
        near = (self.row.reported.after, self.seed) == (other.row.key, other.seed)
        return near and begins(other.recipe(settings), self.recipe(settings))


def key_of(setting: str) -> str:
    """What `--set tasks.sst.weight=2` changes."""
    return setting.partition("=")[0].strip()


def key_within(setting: str) -> str:
    """The same, of a stage's setting within the stage: `--set stages.simcse.optimizer.lr=2e-5` changes optimizer.lr."""
    first, *rest = key_of(setting).split(".", 2)
    return rest[1] if first == "stages" and len(rest) > 1 else key_of(setting)


def table_of(setting: str) -> str | None:
    """The task that `--set tasks.sst.weight=2` is about, tasks.sst, or a stage likewise; None: it is about every recipe."""
    table, *names = key_of(setting).split(".")
    if table not in ("tasks", "stages"):
        return None
    if not names:
        example = "tasks.sst.weight=2" if table == "tasks" else "stages.simcse.optimizer.lr=2e-5"
        raise MinbertError(f"--set {setting}: expected a {table[:-1]} and its setting, such as {example}")
    return f"{table}.{names[0]}"


def tables_of(row: Row) -> set[str]:
    """The tasks and stages that a row's recipe has, as `table_of` names them."""
    recipe = read_recipe(row.path)
    return {f"tasks.{task.name}" for task in recipe.tasks} | {f"stages.{stage.name}" for stage in recipe.stages}


OPTIONS = {"model.encoder": "--encoder", "seed": "--seeds", "training.max_steps": "--steps-cap"}
"""Settings that are options here, so that a result's place and its conditions say them."""


def check_sets(rows: Iterable[Row], sets: Sequence[str]) -> None:
    """Is each `--set` about something that a row to be run has, and that is no option or name?"""
    named = set().union(*map(tables_of, rows))
    for setting in sets:
        if (key := key_within(setting)) in ("name", "about") or key.startswith("paper."):
            raise MinbertError(f"--set {setting}: is what a row is called; expected something that it trains with")
        if option := OPTIONS.get(key):
            raise MinbertError(f"--set {setting}: expected {option} instead, which is recorded with each result")
        if (table := table_of(setting)) is not None and table not in named:
            raise MinbertError(
                f"--set {setting}: none of these rows has {table}{suggest(table, named)}; "
                f"expected one of: {', '.join(sorted(named))}"
            )


def plan_jobs(papers: Mapping[str, Paper], rows: Iterable[Row], *, seeds: int) -> list[Job]:
    """The most telling first: each paper's best row, rows that findings need, the others; then all that with more seeds."""
    jobs = [Job(row, seed) for seed in range(1, seeds + 1) for row in rows]
    return sorted(jobs, key=lambda job: (job.seed > 1, papers[job.row.paper].rank(job.row.name), job.seed))


def check_ready(jobs: Sequence[Job], settings: Settings) -> None:
    """Say what would stop a run, before any is started: a setting that is nobody's, its device, its encoder, a file or a
    package that is not there, a folder that cannot be written."""
    from minbert.data.parts_of_speech import tagger
    from minbert.data.tokenizer import Tokenizer
    from minbert.machine import choose_device
    from minbert.model.pretrained import load_folder

    check_sets((job.row for job in jobs), settings.sets)
    missing, _ = sort_out(jobs, settings)
    recipes = [job.recipe(settings) for job in missing]
    if recipes:
        choose_device(settings.device)
    for encoder in dict.fromkeys(recipe.model.encoder for recipe in recipes):
        folder = find_encoder(encoder)
        load_folder(folder)
        Tokenizer.load(folder)
    for recipe in recipes:
        for part in (*recipe.stages, recipe):
            files_of(part, data_folder(recipe, settings.data))
            if any(pooling_weights(part, task) for task in part.tasks):
                tagger()
    for job in missing:
        if why := would_lose(job, settings):
            raise MinbertError(why)
    for folder in (settings.runs, settings.results) if recipes else ():
        check_writable(folder)


TRAINED = ("checkpoints/step-*", "model", "models/*")
"""What a run, a stage of it, or an ensemble's run has trained, in its folder."""


def would_lose(job: Job, settings: Settings) -> str:
    """Why a job may not begin anew in its folder, where that would lose what a run begun otherwise has trained; empty where
    nothing is lost, or where that was asked for."""
    folder = job.folder(settings)
    if settings.replace or not any(any(folder.rglob(name)) for name in TRAINED):
        return ""
    if not (why := begun_otherwise(job, settings)):
        return ""
    return (
        f"{shown(folder)}: holds what a run that was begun otherwise has trained ({'; '.join(why[:3])}); "
        "expected --replace to begin anew, or another folder with --runs"
    )


def begun_otherwise(job: Job, settings: Settings) -> list[str] | None:
    """In what the run that was begun in a job's folder is not the one that would be; None where there is none."""
    folder, recipe = job.folder(settings), job.recipe(settings)
    if not (folder / STARTED).exists():
        return None
    try:
        found = started_otherwise(folder, recipe, settings.encoder_weights)
    except MinbertError as error:  # of a version whose recipes said other things
        return [str(error)]
    parts = {folder: recipe}
    parts |= {stage_folder(folder, number, stage): stage for number, stage in enumerate(recipe.stages, start=1)}
    for place, part in parts.items():
        if notes := read_notes(place):
            found += other_files(notes, part, data_folder(recipe, settings.data))
    return found


def check_page(page: Path) -> None:
    """Can the page be written, and its figures beside it?"""
    require("matplotlib", "report", "drawing the figures of minbert reproduce")
    if page.is_dir():
        raise MinbertError(
            f"{shown(page)}: is a folder; expected a file for the page, such as {shown(page / 'page.md')}"
        )
    check_writable(page.parent)


def check_writable(folder: Path) -> None:
    """Can files be written there? The folder is made if it is not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise MinbertError(f"{shown(folder)}: cannot be written ({reason}); expected a folder to write into") from None


def sort_out(jobs: Iterable[Job], settings: Settings) -> tuple[list[Job], dict[Job, list[str]]]:
    """What is to be run; and what has a result that stays, each with what was different about its run."""
    found = {job: made_otherwise(job, settings) for job in jobs}
    there = {job: why for job, why in found.items() if why is not None and not (why and settings.replace)}
    return [job for job in found if job not in there], there


def made_otherwise(job: Job, settings: Settings) -> list[str] | None:
    """What was different about the run whose result is there; None where there is no result."""
    try:
        found = json.loads(job.result(settings).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return unlike(found, job, settings) if isinstance(found, dict) else None


def unlike(results: Mapping[str, Any], job: Job, settings: Settings) -> list[str]:
    """What is different about a run that would be made now: its recipe, or the content of its files. Files that are not
    there cannot be asked."""
    recipe = job.recipe(settings)
    folder = data_folder(recipe, settings.data)
    found = changes_since(results, recipe, settings) + other_files(results.get("data", {}), recipe, folder)
    found += other_members(results, recipe)
    found += other_encoder(recipe, results, settings.encoder_weights)
    for stage in recipe.stages:  # older results say nothing of what their stages read
        notes = results.get("stages", {}).get(stage.name, {}).get("data")
        found += other_files(notes, stage, folder) if notes else []
    return list(dict.fromkeys(found))


def other_members(results: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Of an ensemble whose runs had other seeds than they would have now."""
    now, found = {own.seed for own in members_of(recipe)}, {one["seed"] for one in results.get("members", ())}
    now_said, found_said = (", ".join(map(str, sorted(seeds))) for seeds in (now, found))
    return [f"seeds of the ensemble's runs: {now_said}, was {found_said}"] if found - now else []


def changes_since(results: Mapping[str, Any], recipe: Recipe, settings: Settings) -> list[str]:
    """What of the recipe, or of the parts that it names, is not as it was when these results were made, but for what has been
    written about it, scored or written beside. A run that no cap shortened is one of every cap that would not have."""
    try:
        before = parse_recipe(results.get("recipe", {}))
    except MinbertError as error:  # of a version whose recipes said other things
        return [str(error)]
    now = portable(recipe, settings)
    same: dict[str, Any] = dict(ASIDE)
    if not was_cut(results) and (not settings.steps_cap or longest_part(results) <= settings.steps_cap):
        same["max_steps"] = 0
    parts = revised(now, results.get("revisions", {}))
    return differences(_trained_with(now, **same), _trained_with(before, **same)) + parts


def was_cut(results: Mapping[str, Any]) -> bool:
    """Did a limit on the steps shorten the run, or a stage of it?"""
    limits = {stage["name"]: stage["training"].get("max_steps", 0) for stage in results["recipe"].get("stages", ())}
    stages = {name: stage["steps"] for name, stage in results.get("stages", {}).items()}
    at_limit = any(limits.get(name, 0) and steps >= limits[name] for name, steps in stages.items())
    return results.get("planned_steps", 0) < results.get("whole_steps", 0) or at_limit


def longest_part(results: Mapping[str, Any]) -> float:
    """Steps of the longest training in a run: of its stages, or of an ensemble's members."""
    members = results["recipe"].get("ensemble", {}).get("runs", 1)
    return max(
        results.get("whole_steps", 0) / members, *(stage["steps"] for stage in results.get("stages", {}).values()), 0
    )


def _trained_with(recipe: Recipe, **training: Any) -> Recipe:
    """With these settings of the training, and of that of each stage."""
    stages = tuple(replace(stage, training=replace(stage.training, **training)) for stage in recipe.stages)
    return replace(recipe, training=replace(recipe.training, **training), stages=stages)


def portable(recipe: Recipe, settings: Settings) -> Recipe:
    """Without the place of the encoder on this machine."""
    return replace(recipe, model=replace(recipe.model, encoder=settings.encoder_name))
