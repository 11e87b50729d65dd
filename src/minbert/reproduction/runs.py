"""Run what is missing: every (row, seed) in a process of its own, several side by side, until all is done or time is up.

    jobs = plan_jobs(papers, rows, seeds=3)
    check_ready(jobs, settings)
    outcome = run_jobs(jobs, settings, watcher)

A finished run leaves RESULTS/ENCODER/PAPER/ROW/seedN.json: its results.json, with the history of its evaluations and
what was changed on the command line. Of a paper's best row there is mistakes-seedN.json beside it, the error analysis
without sentences. A run counts as done if its result is there and was made by the very recipe that would be run now,
also where a best row's result is older than that analysis and has none; a run that was stopped goes on from where it was.
A row that is the one before it with more epochs waits for that one, where both are to be run, and goes on from its end.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from minbert.atomic import atomic_folder
from minbert.config import Recipe, data_folder
from minbert.encoders import find_encoder, last_part
from minbert.errors import MinbertError, shown
from minbert.evaluation.mistakes import read_mistakes, write_mistakes
from minbert.evaluation.overlap import by_overlap, overlap_points
from minbert.evaluation.results import read_predictions, read_results, write_json
from minbert.preparing import check_files, pooling_weights
from minbert.recipes import as_dict, begins, differences, parse_recipe, read_recipe
from minbert.reproduction.recipes import Paper, Row
from minbert.training.metrics_log import read_metrics

PATIENCE = 60.0  # seconds that each run has to end once it was asked to: a step, and a checkpoint of up to 2 GB
MISTAKES = 5  # of each direction, in the error analysis
TAIL = 8192  # bytes at the end of metrics.jsonl that hold its last line


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
    poll: float = 0.3
    """Seconds between looks at the processes."""
    trainer: tuple[str, ...] = (sys.executable, "-m", "minbert", "train")
    """The command that trains a recipe."""

    @property
    def encoder_name(self) -> str:
        return last_part(self.encoder)


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
        names = {task.name for task in read_recipe(self.row.path).tasks}
        return [setting for setting in settings.sets if _task_of(setting) in (None, *names)]

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


def _task_of(setting: str) -> str | None:
    """The task that `--set tasks.sst.weight=2` is about."""
    table, *names = setting.partition("=")[0].strip().split(".")
    if table != "tasks":
        return None
    if not names:
        raise MinbertError(f"--set {setting}: expected a task and its setting, such as tasks.sst.weight=2")
    return names[0]


def plan_jobs(papers: Mapping[str, Paper], rows: Iterable[Row], *, seeds: int) -> list[Job]:
    """The most telling first: each paper's best row, rows that findings need, the others; then all that with more seeds."""
    jobs = [Job(row, seed) for seed in range(1, seeds + 1) for row in rows]
    return sorted(jobs, key=lambda job: (job.seed > 1, papers[job.row.paper].rank(job.row.name), job.seed))


def check_ready(jobs: Iterable[Job], settings: Settings) -> None:
    """Say what would stop a run, before any is started: its device, its encoder, a file or a package that is not there."""
    from minbert.data.parts_of_speech import tagger
    from minbert.data.tokenizer import Tokenizer
    from minbert.machine import choose_device
    from minbert.model.pretrained import load_folder

    recipes = [job.recipe(settings) for job in jobs if not is_done(job, settings)]
    if recipes:
        choose_device(settings.device)
    for encoder in dict.fromkeys(recipe.model.encoder for recipe in recipes):
        folder = find_encoder(encoder)
        load_folder(folder)
        Tokenizer.load(folder)
    for recipe in recipes:
        for part in (*recipe.stages, recipe):
            check_files(part, data_folder(recipe, settings.data))
            if any(pooling_weights(part, task) for task in part.tasks):
                tagger()


def is_done(job: Job, settings: Settings) -> bool:
    """Is there a result of this very recipe?"""
    try:
        found = json.loads(job.result(settings).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return made_by(found, job.recipe(settings), settings)


def made_by(results: Mapping[str, Any], recipe: Recipe, settings: Settings) -> bool:
    """Were these results made by this recipe, whatever has been written about it since and however many training rows were
    scored beside? A run that no cap shortened is one of every cap that would not have."""
    try:
        before = parse_recipe(results["recipe"])
    except (KeyError, MinbertError):  # of a version whose recipes said other things
        return False
    now = replace(_portable(recipe, settings), about=before.about)
    same: dict[str, Any] = {"train_sample": 0}
    if not was_cut(results) and (not settings.steps_cap or longest_part(results) <= settings.steps_cap):
        same["max_steps"] = 0
    return not differences(_trained_with(now, **same), _trained_with(before, **same))


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


def _portable(recipe: Recipe, settings: Settings) -> Recipe:
    """Without the place of the encoder on this machine."""
    return replace(recipe, model=replace(recipe.model, encoder=settings.encoder_name))


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    folder: Path
    started: float = field(default_factory=time.monotonic)

    def last_record(self) -> dict[str, Any]:
        """The newest line of the run's metrics; empty before the first."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - TAIL))
                lines = file.read().split(b"\n")[:-1]  # what follows the last line's end is not yet whole
            return dict(json.loads(lines[-1])) if lines else {}
        except (OSError, ValueError):
            return {}


class Watcher(Protocol):
    """Is told how it goes."""

    def looked(self, running: list[Running], waiting: int) -> None: ...
    def finished(self, job: Job, results: Mapping[str, Any]) -> None: ...
    def failed(self, job: Job, why: str) -> None: ...


@dataclass
class Outcome:
    done: list[Job] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    stopped: list[Job] = field(default_factory=list)
    """Under way when time was up; the next call goes on with them."""
    left: list[Job] = field(default_factory=list)
    """Not begun."""
    interrupted: bool = False


def run_jobs(jobs: Iterable[Job], settings: Settings, watcher: Watcher) -> Outcome:
    """Run what is not done, in order, until all is done, the budget is spent, or Ctrl-C."""
    outcome = Outcome(left=[job for job in jobs if not is_done(job, settings)])
    deadline = time.monotonic() + settings.budget
    running: list[Running] = []
    try:
        while (outcome.left or running) and time.monotonic() < deadline:
            while len(running) < settings.jobs and (job := _next_of(outcome.left, running, settings)):
                running.append(start(job, settings))
                outcome.left.remove(job)
            watcher.looked(running, len(outcome.left))
            time.sleep(settings.poll)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                _settle(one, settings, outcome, watcher)
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        stop(running)
        for one in running:
            _settle(one, settings, outcome, watcher, was_stopped=True)
        watcher.looked([], len(outcome.left))
    return outcome


def _next_of(left: Sequence[Job], running: Iterable[Running], settings: Settings) -> Job | None:
    """The first that follows none that is under way or still to come."""
    before = [*left, *(one.job for one in running)]
    return next((job for job in left if not any(job.follows(other, settings) for other in before)), None)


def start(job: Job, settings: Settings) -> Running:
    """A process that trains, or goes on where an earlier one was stopped."""
    folder = job.folder(settings)
    command = [*settings.trainer, str(job.row.path), "--seed", str(job.seed)]
    command += ["--out", str(folder), "--device", settings.device]
    command += ["--data", settings.data] if settings.data else []
    for setting in job.changes(settings):
        command += ["--set", setting]
    command.append("--resume" if _is_begun(folder, job.recipe(settings)) else "--overwrite")
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "160"}
    if settings.jobs > 1:
        environment["OMP_NUM_THREADS"] = "1"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with log_of(folder).open("ab") as log, _heard_by_children():
        # A session of its own: Ctrl-C reaches us alone, and we pass it on
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    return Running(job, process, folder)


@contextmanager
def _heard_by_children() -> Iterator[None]:
    """What a script starts in the background ignores Ctrl-C, and so would all that it starts: but we stop runs by it."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():  # others may not change it
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def log_of(folder: Path) -> Path:
    """What a run prints."""
    return folder.with_suffix(".log")


def _is_begun(folder: Path, recipe: Recipe) -> bool:
    """Is there a run in the folder that can go on with this recipe?"""
    try:
        before = read_recipe(folder / "recipe.toml")
    except MinbertError:
        return False
    return not differences(recipe, before) or begins(before, recipe)


def stop(running: Sequence[Running]) -> None:
    """Ask runs to end, as Ctrl-C would, and wait; one that does not is ended."""
    for one in running:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + PATIENCE * len(running)  # they write to one disk
    for one in running:
        try:
            one.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


def _settle(one: Running, settings: Settings, outcome: Outcome, watcher: Watcher, *, was_stopped: bool = False) -> None:
    """File a process that has ended."""
    job = one.job
    if one.process.returncode == 0:
        outcome.done.append(job)
        for later in outcome.left:
            if later.follows(job, settings) and not _is_begun(later.folder(settings), later.recipe(settings)):
                _hand_on(one.folder, later.folder(settings))
        watcher.finished(job, collect(job, settings))
    elif was_stopped:
        outcome.stopped.append(job)
    else:
        outcome.failed.append(job)
        watcher.failed(job, _last_words(log_of(one.folder)))


def _hand_on(folder: Path, later: Path) -> None:
    """A copy of a finished run for another that goes on from its end."""
    with atomic_folder(later) as new:
        shutil.copytree(folder, new, dirs_exist_ok=True)


def collect(job: Job, settings: Settings) -> dict[str, Any]:
    """The run's results, its history and what was changed, into results/; what only a run needs is removed."""
    folder = job.folder(settings)
    results = read_results(folder)
    metrics = folder / "metrics.jsonl"
    evaluations = (
        [record for record in read_metrics(metrics) if record["kind"] == "evaluation"] if metrics.exists() else []
    )
    content = {
        **results,
        "encoder": settings.encoder_name,
        "recipe": as_dict(_portable(job.recipe(settings), settings)),
        "data": _without_folders(results["data"]),
        "reproduction": {
            "row": job.row.key,
            "set": job.sets(settings),
            "steps_cap": settings.steps_cap,
            "history": [
                {key: one[key] for key in ("step", "epoch", "scores", "kept", "seconds")} for one in evaluations
            ],
            "overlap": _overlaps(folder, results),
        },
    }
    if job.row.is_best:
        write_mistakes(read_mistakes(folder, count=MISTAKES), job.mistakes(settings), texts=False)
    write_json(job.result(settings), content)
    for name in ("checkpoints", *(() if settings.keep_models else ("model", "models"))):
        for place in [*folder.rglob(name)]:  # stages and the runs of an ensemble have theirs
            shutil.rmtree(place, ignore_errors=True)
    return content


def _overlaps(folder: Path, results: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Of each task that scores pairs: mean label and mean answer by the words that the two texts share."""
    tasks = [task for task, kind in results["kinds"].items() if kind == "pair-regression"]
    found = {task: by_overlap(overlap_points(read_predictions(folder, task).rows)) for task in tasks}
    return {task: [asdict(one) for one in bins] for task, bins in found.items()}


def _without_folders(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The files that were read by their names alone: where they lie is nobody else's concern."""
    return {
        split: {
            task: {**note, "files": {Path(path).name: digest for path, digest in note["files"].items()}}
            for task, note in tasks.items()
        }
        for split, tasks in notes.items()
    }


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return f"{shown(log)}: {lines[-1] if lines else 'nothing was printed'}"
