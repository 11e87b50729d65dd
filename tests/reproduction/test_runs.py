"""Runs as processes: started, stopped, killed, gone on with, and what each leaves in results/."""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minbert import cli
from minbert.console import ReproductionWatcher
from minbert.evaluation.mistakes import load_mistakes
from minbert.recipes import write_started
from minbert.reproduction.found import load_results
from minbert.reproduction.jobs import Job, Settings
from minbert.reproduction.recipes import Paper, find_papers
from minbert.reproduction.runs import Running, run_jobs, start
from minbert.training.checkpoint import list_checkpoints
from minbert.training.metrics_log import read_metrics
from minbert.training.stopping import ENDING, asked_to_end
from tests.reproduction.made_up import Impatient, Listener, calls, jobs_of


def test_what_is_missing_is_run_and_nothing_twice(papers: dict[str, Paper], recipes: Path, settings: Settings) -> None:
    listener = Listener()
    outcome = run_jobs(jobs_of(papers), replace(settings, jobs=2), listener)
    assert sorted(listener.done) == ["1-plain:1", "2-mean:1", "3-other:1", "one:1"]
    assert listener.most == 2
    assert not (outcome.failed or outcome.left or outcome.stopped or outcome.interrupted)
    again = run_jobs(jobs_of(papers, seeds=2), settings, Listener())
    assert [job.seed for job in again.done] == [2, 2, 2, 2]
    assert len(calls(recipes, "smith/1-plain")) == 2


def test_a_result_holds_what_is_needed_and_nothing_of_this_machine(
    papers: dict[str, Paper], settings: Settings
) -> None:
    changed = replace(settings, sets=("optimizer.lr=1e-4",), steps_cap=6)
    (job,) = jobs_of(papers, "smith/2-mean")
    run_jobs([job], changed, Listener())
    path = settings.results / "tiny" / "smith" / "2-mean" / "seed1.json"
    assert path == job.result(settings)
    text = path.read_text()
    assert "/home/me" not in text
    found = json.loads(text)
    assert found["reproduction"]["row"] == "smith/2-mean"
    assert (found["reproduction"]["set"], found["reproduction"]["steps_cap"]) == (["optimizer.lr=1e-4"], 6)
    assert [one["kept"] for one in found["reproduction"]["history"]] == [["model"], []]
    apart, same = found["reproduction"]["overlap"]["sts"]  # no sentences, only means
    assert (apart["label"], apart["prediction"], same["bleu"], same["prediction"]) == (0.0, 1.0, 1.0, 4.5)
    assert found["data"]["train"]["sst"]["files"] == {"sst.tsv": "ab"}
    assert (found["recipe"]["training"]["max_steps"], found["recipe"]["optimizer"]["lr"]) == (6, 1e-4)
    assert found["recipe"]["paper"]["note"] == "A guess."
    assert (found["environment"]["commit"], found["seconds"]) == ("abc", 7.0)
    folder = job.folder(settings)
    assert not [*folder.rglob("checkpoints"), *folder.rglob("model*")]


def test_the_mistakes_of_a_best_row_are_kept_without_sentences(papers: dict[str, Paper], settings: Settings) -> None:
    jobs = jobs_of(papers, "smith", seeds=2)
    run_jobs(jobs, settings, Listener())
    best = [job for job in jobs if job.row.is_best]
    assert [f"{job.row.name}:{job.seed}" for job in best] == ["2-mean:1", "2-mean:2"]
    written = [job.mistakes(settings) for job in best]
    assert sorted(settings.results.rglob("mistakes-*")) == written
    assert not re.search("/home/me|dog|sleeps", written[1].read_text())
    sst, sts = load_mistakes(written[1])
    assert sst.score == "accuracy 0.402 of 2-mean with tiny, seed 2"
    assert [(sst.expected(row), sst.predicted(row)) for group in sst.groups for row in group.rows] == [
        ("bad", "good (80.0%)")
    ]
    assert [row["id"] for group in sts.groups for row in group.rows] == ["1", "0"]
    assert [*load_results(papers, settings.results)["tiny"]["smith/2-mean"].by_seed] == [1, 2]  # they are no results


def test_models_are_kept_on_request(papers: dict[str, Paper], settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/2-mean")
    run_jobs([job], replace(settings, keep_models=True), Listener())
    assert (job.folder(settings) / "model").exists()
    assert not (job.folder(settings) / "checkpoints").exists()


def test_a_row_that_another_process_has_run_meanwhile_is_not_run_again(
    papers: dict[str, Paper], recipes: Path, settings: Settings
) -> None:
    class Helpful(Listener):
        def looked(self, running: list[Running], waiting: int) -> None:
            if waiting == 1 and not self.done:
                run_jobs(jobs_of(papers, "smith/1-plain"), settings, Listener())
            super().looked(running, waiting)

    outcome = run_jobs(jobs_of(papers, "smith/1-plain", "smith/2-mean"), settings, Helpful())
    assert [job.row.name for job in outcome.done] == ["2-mean"]
    assert [job.row.name for job in outcome.there] == ["1-plain"]
    assert len(calls(recipes, "smith/1-plain")) == 1


def test_what_was_trained_is_not_lost_where_a_recipe_changes_while_its_row_waits(
    papers: dict[str, Paper], settings: Settings
) -> None:
    careful = replace(settings, replace=False)
    first, waits = jobs_of(papers, "smith/2-mean", "smith/1-plain")
    kept = waits.folder(careful) / "checkpoints" / "step-00000003"
    kept.mkdir(parents=True)
    write_started(waits.folder(careful), waits.recipe(careful), "its weights")

    class Editor(Listener):
        def started(self, job: Job, log: Path) -> None:
            super().started(job, log)
            waits.row.path.write_text(waits.row.path.read_text() + "[optimizer]\nlr = 1e-4\n")

    outcome = run_jobs([first, waits], careful, listener := Editor())
    assert (outcome.done, outcome.failed, listener.begun) == ([first], [waits], ["2-mean:1"])
    assert "has trained (optimizer.lr: 0.0001, was 2e-05); expected --replace to begin anew" in listener.why[0]
    assert kept.exists()


def test_a_row_that_fails_does_not_stop_the_others(papers: dict[str, Paper], recipes: Path, settings: Settings) -> None:
    (recipes / "smith" / "2-mean.fails").touch()
    listener = Listener()
    outcome = run_jobs(jobs_of(papers, "smith"), settings, listener)
    assert [job.row.name for job in outcome.failed] == ["2-mean"]
    assert listener.begun == ["2-mean:1", "1-plain:1", "3-other:1"]
    assert listener.done == ["1-plain:1", "3-other:1"]
    assert listener.why[0].endswith("seed1.log: error: the dog ate it")


@pytest.fixture
def ctrl_c(request: pytest.FixtureRequest) -> Iterator[None]:
    """As at a terminal, or ignored as in what a script starts in the background."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    assert signal.getsignal(signal.SIGINT) is request.param
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    "ctrl_c", [signal.default_int_handler, signal.SIG_IGN], indirect=True, ids=["heard", "ignored"]
)
def test_when_time_is_up_runs_are_stopped_and_go_on_the_next_time(
    papers: dict[str, Paper], recipes: Path, settings: Settings
) -> None:
    (recipes / "smith" / "2-mean.waits").touch()
    started = time.monotonic()
    outcome = run_jobs(jobs_of(papers, "smith"), replace(settings, budget=3.0), Listener())
    assert time.monotonic() - started < 20
    assert [job.row.name for job in outcome.stopped] == ["2-mean"]
    assert [job.row.name for job in outcome.left] == ["1-plain", "3-other"]
    assert not outcome.done and not outcome.interrupted
    (recipes / "smith" / "2-mean.waits").unlink()
    assert run_jobs(jobs_of(papers, "smith"), settings, Listener()).done[0].row.name == "2-mean"
    first, second = calls(recipes, "smith/2-mean")
    assert first.endswith("--overwrite") and second.endswith("--resume")


def test_a_run_of_another_recipe_is_not_gone_on_with(
    papers: dict[str, Paper], recipes: Path, settings: Settings
) -> None:
    (recipes / "smith" / "2-mean.fails").touch()
    jobs = jobs_of(papers, "smith/2-mean")
    run_jobs(jobs, settings, Listener())
    run_jobs(jobs, replace(settings, steps_cap=5), Listener())
    assert [line.split()[-1] for line in calls(recipes, "smith/2-mean")] == ["--overwrite", "--overwrite"]


def test_without_time_nothing_is_begun(papers: dict[str, Paper], recipes: Path, settings: Settings) -> None:
    outcome = run_jobs(jobs_of(papers), replace(settings, budget=0.0), Listener())
    assert len(outcome.left) == 4
    assert calls(recipes, "smith/2-mean") == []


def test_ctrl_c_ends_every_run(papers: dict[str, Paper], recipes: Path, settings: Settings) -> None:
    for row in ("1-plain", "2-mean"):
        (recipes / "smith" / f"{row}.waits").touch()
    outcome = run_jobs(jobs_of(papers, "smith"), replace(settings, jobs=2), Listener(interrupt=True))
    assert outcome.interrupted
    assert sorted(job.row.name for job in outcome.stopped) == ["1-plain", "2-mean"]
    assert [job.row.name for job in outcome.left] == ["3-other"]


class Murderer(Listener):
    def looked(self, running: list[Running], _waiting: int) -> None:
        if running and (running[0].folder / "waiting").exists():
            running[0].process.kill()


def test_a_run_that_is_killed_is_not_blamed_on_its_last_words(
    papers: dict[str, Paper], recipes: Path, settings: Settings
) -> None:
    (recipes / "smith" / "2-mean.waits").touch()
    listener = Murderer()
    outcome = run_jobs(jobs_of(papers, "smith/2-mean"), settings, listener)
    assert [job.row.name for job in outcome.failed] == ["2-mean"]
    assert re.fullmatch(r"killed by signal 9 \(out of memory\?\); .*seed1\.log: waiting", listener.why[0])


class Ending(Listener):
    """Sends this process a signal as soon as a run has come so far that it waits."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.processes: list[Any] = []

    def looked(self, running: list[Running], _waiting: int) -> None:
        if running and (running[0].folder / "waiting").exists():
            self.processes = [one.process for one in running]
            signal.raise_signal(self.number)


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("number", ENDING)
def test_what_ends_the_command_leaves_no_run_behind(
    papers: dict[str, Paper], recipes: Path, settings: Settings, number: int
) -> None:
    """A run is in a session of its own and does not hear what its parent hears."""
    (recipes / "smith" / "2-mean.waits").touch()
    listener = Ending(number)
    with asked_to_end():
        outcome = run_jobs(jobs_of(papers, "smith/2-mean"), settings, listener)
    assert outcome.interrupted and [job.row.name for job in outcome.stopped] == ["2-mean"]
    assert [process.poll() for process in listener.processes] == [130]


def test_a_real_run_that_is_stopped_goes_on_where_it_was(
    papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, small_data: Path
) -> None:
    """However short the time is, and though no checkpoint is due: else it would begin anew each time, and never end."""
    sets = ("training.batch_size=1", "training.log_every=1", "training.epochs=1", "tasks.sst.fraction=100")
    real = replace(settings, encoder=str(tiny_encoder), data=str(small_data), device="cpu", sets=sets)
    real = replace(real, trainer=Settings.trainer)
    (job,) = jobs_of(papers, "smith/1-plain")
    steps = [0]
    for _ in range(2):
        assert run_jobs([job], real, Impatient(steps[-1])).stopped == [job]
        (saved,) = list_checkpoints(job.folder(real) / "checkpoints")
        steps.append(int(saved.name.removeprefix("step-").removesuffix("-stopped")))
    lines = [line["step"] for line in read_metrics(job.folder(real) / "metrics.jsonl")]
    assert 0 < steps[1] < steps[2] < 2400
    assert lines == list(range(1, steps[2] + 1))


LONGER = """
base = "2-mean.toml"
[training]
epochs = 4
[paper]
row = "Longer"
after = "smith/2-mean"
"""


STEADY = ("optimizer.schedule=constant", "optimizer.warmup=0")


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_a_row_with_more_epochs_goes_on_from_the_end_of_the_other(recipes: Path, settings: Settings) -> None:
    (recipes / "smith" / "4-longer.toml").write_text(LONGER)
    steady, listener = replace(settings, sets=STEADY, jobs=4), Listener()
    run_jobs(jobs_of(find_papers(recipes), "smith/4-longer", "smith/2-mean", seeds=2), steady, listener)
    assert listener.most == 2  # those of four epochs wait
    assert sorted(listener.done) == ["2-mean:1", "2-mean:2", "4-longer:1", "4-longer:2"]
    assert [call.split()[-1] for call in calls(recipes, "smith/2-mean")] == ["--overwrite"] * 2
    assert [call.split()[-1] for call in calls(recipes, "smith/4-longer")] == ["--resume"] * 2


@pytest.mark.parametrize(
    "why", ["the rate falls", "the other is done", "the other fails", "there is no room for a copy"]
)
def test_a_row_with_more_epochs_has_a_run_of_its_own_where_it_must(
    recipes: Path, settings: Settings, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipes / "smith" / "4-longer.toml").write_text(LONGER)
    papers, steady = find_papers(recipes), replace(settings, sets=() if why == "the rate falls" else STEADY)
    if why == "the other is done":
        run_jobs(jobs_of(papers, "smith/2-mean"), steady, Listener())
    elif why == "the other fails":
        (recipes / "smith" / "2-mean.fails").touch()
    elif why == "there is no room for a copy":
        monkeypatch.setattr(shutil, "copytree", raising(OSError(errno.ENOSPC, "No space left on device")))
    run_jobs(jobs_of(papers, "smith/4-longer", "smith/2-mean"), steady, listener := Listener())
    assert "4-longer:1" in listener.done
    assert [call.split()[-1] for call in calls(recipes, "smith/4-longer")] == ["--overwrite"]


def test_a_real_row_with_more_epochs_has_the_results_of_a_run_of_its_own(
    recipes: Path, tiny_encoder: Path, small_data: Path, settings: Settings
) -> None:
    (recipes / "smith" / "4-longer.toml").write_text(LONGER)
    papers = find_papers(recipes)
    real = replace(settings, encoder=str(tiny_encoder), data=str(small_data), device="cpu", sets=STEADY)
    real = replace(real, trainer=Settings.trainer)
    alone = replace(real, results=real.results / "alone", runs=real.runs / "alone")
    (longer,) = jobs_of(papers, "smith/4-longer")
    run_jobs([longer], alone, Listener())
    outcome = run_jobs(jobs_of(papers, "smith/4-longer", "smith/2-mean"), real, Listener())
    assert [job.row.name for job in outcome.done] == ["2-mean", "4-longer"]
    whole, gone_on = (json.loads(longer.result(one).read_text()) for one in (alone, real))
    for found in (whole, gone_on):
        del found["seconds"]
        for record in found["reproduction"]["history"]:
            del record["seconds"]
    assert gone_on == whole
    assert not [*longer.folder(real).rglob("checkpoints")]


def test_the_newest_line_of_a_run_is_seen(papers: dict[str, Paper], settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/2-mean")
    run_jobs([job], settings, Listener())
    running = Running(job, None, job.folder(settings), epochs=2)  # type: ignore[arg-type]
    assert running.last_record()["step"] == 6
    with (job.folder(settings) / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert running.last_record()["step"] == 6
    assert Running(job, None, settings.runs / "nowhere", epochs=2).last_record() == {}  # type: ignore[arg-type]


def test_at_a_terminal_a_table_says_how_far_each_run_is(
    papers: dict[str, Paper], recipes: Path, settings: Settings
) -> None:
    path = recipes / "smith" / "2-mean.toml"
    path.write_text(path.read_text() + '[sampler]\nkind = "sequential"\n')  # an epoch is one task's there
    (job,) = jobs_of(papers, "smith/2-mean")
    running = start(job, settings)
    assert running.process.wait() == 0
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    with ReproductionWatcher(screen) as watcher:
        watcher.looked([running], 3)
    assert isinstance(screen.file, io.StringIO)
    table = screen.file.getvalue()
    assert "0 done, 1 running, 3 waiting" in table
    assert re.search(r"smith/2-mean .* 1 .* 2 of 4 .* 6 .* sst -1.599  sts - ", table)


def test_a_real_row_from_the_command_line(
    papers: dict[str, Paper],
    recipes: Path,
    tmp_path: Path,
    tiny_encoder: Path,
    small_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "smith/2-mean",
        "smith/1-plain",
        "--encoder",
        tiny_encoder,
        "--steps-cap",
        3,
        "--jobs",
        2,
        "--device",
        "cpu",
    ]
    words += [
        "--data",
        small_data,
        "--recipes",
        recipes,
        "--results",
        tmp_path / "results",
        "--runs",
        tmp_path / "runs",
    ]
    words += ["--page", tmp_path / "docs" / "page.md"]
    more = "the same command goes on where this one ended"
    for told, options in (
        ("0 were there, 0 run, 0 failed, 0 stopped on the way, 2 not begun\n" + more, ["--budget", 0]),
        ("0 were there, 2 run,", []),
        ("2 were there, 0 run,", []),
        (
            "(optimizer.lr: 0.0001, was 2e-05): --replace makes them anew, --results FOLDER",
            ["--set", "optimizer.lr=1e-4"],
        ),
        ("0 were there, 2 run,", ["--set", "optimizer.lr=1e-4", "--replace"]),
        ("0 were there, 2 run,", ["--replace"]),
    ):
        monkeypatch.setattr(sys, "argv", ["minbert", "reproduce", *map(str, [*words, *options])])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code, "".join(path.read_text() for path in (tmp_path / "runs").rglob("*.log"))
        said = capsys.readouterr()
        assert told in said.out and (more in said.out) == ("--budget" in options)
        assert ("of those there 2 were made otherwise and stay, such as " in said.out) == ("--replace makes" in told)
        begun = ["smith/1-plain seed 1: begins, ", "smith/2-mean seed 1: begins, "] if " 2 run" in told else []
        assert sorted(re.findall(r"^.* begins, ", said.err, re.MULTILINE)) == begun
    found = json.loads((tmp_path / "results" / "tiny" / "smith" / "2-mean" / "seed1.json").read_text())
    assert (found["steps"], found["planned_steps"], found["whole_steps"]) == (3, 3, 12)
    assert len(found["reproduction"]["history"]) == 2
    assert (tmp_path / "runs" / "tiny" / "smith" / "2-mean" / "seed1" / "predictions" / "sst.jsonl").exists()
    page = (tmp_path / "docs" / "page.md").read_text()
    assert "at most 3 steps a run" in page and "3 of 12" in page
