"""Run what is missing: every (row, seed) in a process of its own, several side by side, until all is done or time is up.

    outcome = run_jobs(jobs, settings, watcher)

A finished run leaves RESULTS/ENCODER/PAPER/ROW/seedN.json: its results.json, with the history of its evaluations and
what was changed on the command line. Of a paper's best row there is mistakes-seedN.json beside it, the error analysis
without sentences. A run that was stopped goes on from where it was. A row that is the one before it with more epochs
waits for that one, where both are to be run, and goes on from its end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from minbert.atomic import atomic_folder
from minbert.errors import shown
from minbert.evaluation.mistakes import read_mistakes, write_mistakes
from minbert.evaluation.overlap import by_overlap, overlap_points
from minbert.evaluation.results import read_predictions, read_results, write_json
from minbert.recipes import as_dict, parse_recipe
from minbert.reproduction.jobs import Job, Settings, begun_otherwise, made_otherwise, portable, sort_out, would_lose
from minbert.training.metrics_log import read_metrics

PATIENCE = 60.0  # seconds that each run has to end once it was asked to: a step, and a checkpoint of up to 2 GB
MISTAKES = 5  # of each direction, in the error analysis
KILL = 9  # what Linux sends where there is no memory left
TAIL = 8192  # bytes at the end of metrics.jsonl that hold its last line


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    folder: Path
    epochs: int
    """As the run's log counts them."""
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
    def started(self, job: Job, log: Path) -> None: ...
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
    there: dict[Job, list[str]] = field(default_factory=dict)
    """What has a result already, and what was different about its run."""
    interrupted: bool = False


def run_jobs(jobs: Iterable[Job], settings: Settings, watcher: Watcher) -> Outcome:
    """Run what is missing, in order, until all is done, the budget is spent, or Ctrl-C."""
    outcome = Outcome()
    outcome.left, outcome.there = sort_out(jobs, settings)
    deadline = time.monotonic() + settings.budget
    running: list[Running] = []
    try:
        while (outcome.left or running) and time.monotonic() < deadline:
            while len(running) < settings.jobs and (job := _next_of(outcome.left, running, settings)):
                outcome.left.remove(job)
                if made_otherwise(job, settings) == []:  # another process has run it meanwhile
                    outcome.there[job] = []
                    continue
                if why := would_lose(job, settings):  # its files have changed meanwhile
                    outcome.failed.append(job)
                    watcher.failed(job, why)
                    continue
                running.append(start(job, settings))
                watcher.started(job, log_of(running[-1].folder))
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
    folder, recipe = job.folder(settings), job.recipe(settings)
    command = [*settings.trainer, str(job.row.path), "--seed", str(job.seed)]
    command += ["--out", str(folder), "--device", settings.device]
    command += ["--data", settings.data] if settings.data else []
    for setting in job.changes(settings):
        command += ["--set", setting]
    command.append("--resume" if begun_otherwise(job, settings) == [] else "--overwrite")
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "160"}
    if settings.jobs > 1:
        environment["OMP_NUM_THREADS"] = "1"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with log_of(folder).open("ab") as log, _heard_by_children():
        # A session of its own: Ctrl-C reaches us alone, and we pass it on
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    return Running(job, process, folder, recipe.turns * recipe.training.epochs)


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
        for later in outcome.left:
            if (
                later.follows(job, settings)
                and begun_otherwise(later, settings) != []
                and not would_lose(later, settings)
            ):
                with suppress(OSError):  # no room: the later one begins at its own beginning
                    _hand_on(one.folder, later.folder(settings))
        results = collect(job, settings)
        outcome.done.append(job)
        watcher.finished(job, results)
    elif was_stopped:
        outcome.stopped.append(job)
    else:
        outcome.failed.append(job)
        watcher.failed(job, _why(one))


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
        "recipe": as_dict(portable(parse_recipe(results["recipe"]), settings)),  # the file may have changed meanwhile
        "data": _without_folders(results["data"]),
        "stages": {
            name: {**stage, "data": _without_folders(stage.get("data", {}))}
            for name, stage in results.get("stages", {}).items()
        },
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


def _why(one: Running) -> str:
    """What is known of a run that failed: how it was killed, and the last that it printed."""
    log = log_of(one.folder)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    last = f"{shown(log)}: {lines[-1] if lines else 'nothing was printed'}"
    if one.process.returncode >= 0:
        return last
    number = -one.process.returncode
    return f"killed by signal {number}{' (out of memory?)' if number == KILL else ''}; {last}"
