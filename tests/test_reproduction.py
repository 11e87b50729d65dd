"""`minbert reproduce`: what is run and in which order, what is skipped, how it is stopped and goes on, what the findings
are judged by, and the page. Most runs here are a script that only pretends to train.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from minbert import cli
from minbert.config import SamplerConfig
from minbert.console import ReproductionWatcher
from minbert.data.raw import fingerprint
from minbert.errors import MinbertError, MissingExtraError
from minbert.evaluation.diagnosis import T975, t_reach
from minbert.evaluation.mistakes import load_mistakes
from minbert.model.pretrained import weights_digest
from minbert.recipes import as_dict, revisions, write_started
from minbert.reproduction.figures import (
    OURS,
    SCHEDULES,
    THEIRS,
    draw_all,
    enough_pairs,
    kept_scores,
    saving_caption,
    schedule,
)
from minbert.reproduction.findings import Difference, judge, scores_of
from minbert.reproduction.found import Found, load_results, verdicts
from minbert.reproduction.jobs import (
    Job,
    Settings,
    begun_otherwise,
    check_page,
    check_ready,
    check_sets,
    longest_part,
    made_otherwise,
    plan_jobs,
    was_cut,
)
from minbert.reproduction.page import build_page, write_page
from minbert.reproduction.recipes import Finding, Paper, choose_rows, find_papers
from minbert.reproduction.runs import Running, run_jobs, start
from minbert.training.checkpoint import list_checkpoints
from minbert.training.metrics_log import read_metrics
from minbert.training.stopping import ENDING, asked_to_end

ROOT = Path(__file__).parent.parent
COMMON = """
[tasks.sst]
train = "sentiment-train.tsv"
dev = "sentiment-dev.tsv"
test = []
[tasks.sts]
train = "similarity-train.tsv"
dev = "similarity-dev.tsv"
test = []
[training]
epochs = 2
batch_size = 8
train_sample = 8
"""
STAGE = '[[stages]]\nname = "first"\n[stages.tasks.sst]\ntrain = "sentiment-train.tsv"\ndev = "sentiment-dev.tsv"\n'
ROWS = {
    "smith/common.toml": COMMON,
    "smith/1-plain.toml": 'base = "common.toml"\n[paper]\nrow = "Plain"\ndev = { sst = 0.4, sts = 0.5 }\noverall = { dev = 0.45 }\n',
    "smith/2-mean.toml": """
base = "common.toml"
[model]
pooling = "mean"
[paper]
row = "Mean"
after = "smith/1-plain"
dev = { sst = 0.5, sts = 0.7 }
overall = { dev = 0.6, test = 0.61 }
test = { sst = 0.51 }
note = "A guess."
""",
    "smith/3-other.toml": 'base = "common.toml"\n[paper]\nrow = "Other"\n[optimizer]\nlr = 1e-4\n',
    "smith/findings.toml": """
title = "Smith, On Vectors"
best = "2-mean"
[[findings]]
claim = "The mean is better."
where = "section 3"
better = "2-mean"
worse = "1-plain"
on = "mean"
[[findings]]
claim = "It is no better on SST."
better = "2-mean"
worse = "1-plain"
on = "sst"
kind = "no better"
""",
    "afterwards/one.toml": 'base = "../smith/common.toml"\n[paper]\nrow = "One"\n',
    "alone.toml": "[tasks.sst]\n",
}
# Stands for `minbert train`: writes what a run leaves behind, or waits, or fails, as a file beside the recipe says.
PRETENDER = """
import json, sys, time
from pathlib import Path
words = sys.argv[1:]
recipe, out = Path(words[0]), Path(words[words.index("--out") + 1])
(recipe.parent / f"{recipe.stem}.calls").open("a").write(" ".join(words) + chr(10))
out.mkdir(parents=True, exist_ok=True)
sys.path.insert(0, SOURCE)
from minbert.recipes import as_dict, read_recipe, to_toml
sets = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
resolved = read_recipe(recipe, sets=sets, seed=int(words[words.index("--seed") + 1]))
(out / "recipe.toml").write_text(to_toml(resolved))
if (recipe.parent / f"{recipe.stem}.fails").exists():
    print("error: the dog ate it")
    sys.exit(2)
if (recipe.parent / f"{recipe.stem}.waits").exists():
    print("waiting", flush=True)
    (out / "waiting").touch()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
(out / "checkpoints").mkdir(exist_ok=True)
(out / "runs" / "1" / "models").mkdir(parents=True, exist_ok=True)
(out / "model").mkdir(exist_ok=True)
score = 0.3 + 0.1 * (resolved.model.pooling == "mean") + 0.001 * resolved.seed
found = {"rows": 3, "metric": "accuracy", "metrics": {"accuracy": {"value": score, "low": 0, "high": 1}}}
note = {"rows": 24, "skipped": {}, "truncated": {"texts": 0, "tokens": 0}, "files": {"/home/me/data/sst.tsv": "ab"}}
kinds = {"sst": "classification", "sts": "pair-regression"}
pairs = [("A dog runs.", "A dog runs.", 5.0, 4.5), ("A dog runs.", "He sleeps.", 0.0, 1.0)]
rows = [{"id": str(n), "text": a, "text2": b, "label": y, "prediction": z} for n, (a, b, y, z) in enumerate(pairs)]
(out / "predictions").mkdir(exist_ok=True)
(out / "predictions" / "sts.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
single = {"id": "7", "text": "A dog sits.", "label": 0, "prediction": 1, "probabilities": [0.2, 0.8]}
(out / "predictions" / "sst.jsonl").write_text(json.dumps(single) + chr(10))
results = {"name": resolved.name, "encoder": resolved.model.encoder, "seed": resolved.seed, "kinds": kinds,
    "dev": {"sst": {**found, "classes": ["bad", "good"]}, "sts": found},
    "overall": {"2023": score, "2024": score}, "seconds": 7.0, "planned_steps": 6, "whole_steps": 12,
    "data": {"train": {"sst": note, "sts": note}}, "recipe": as_dict(resolved),
    "environment": {"device_name": "abacus", "commit": "abc"}}
(out / "results.json").write_text(json.dumps(results))
records = [{"kind": "train", "step": 1}]
for epoch in (1, 2):
    records.append({"kind": "evaluation", "step": 3 * epoch, "epoch": epoch, "kept": ["model"] * (epoch == 1),
        "scores": {"dev": {"sst": score - epoch, "sts": None}}, "seconds": 1.0})
(out / "metrics.jsonl").write_text("".join(json.dumps(record) + chr(10) for record in records))
"""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    for name, text in ROWS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def papers(recipes: Path) -> dict[str, Paper]:
    return find_papers(recipes)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    script = tmp_path / "pretender.py"
    script.write_text(PRETENDER.replace("SOURCE", repr(str(ROOT / "src"))), encoding="utf-8")
    return Settings(
        "/home/me/encoders/tiny",
        results=tmp_path / "results",
        runs=tmp_path / "runs",
        trainer=(sys.executable, str(script)),
        poll=0.02,
        replace=True,
    )


def is_done(job: Job, settings: Settings) -> bool:
    return made_otherwise(job, settings) == []


class Listener:
    """Remembers what it is told; presses Ctrl-C when a run has come so far that it waits."""

    def __init__(self, *, interrupt: bool = False) -> None:
        self.interrupt = interrupt
        self.begun: list[str] = []
        self.done: list[str] = []
        self.why: list[str] = []
        self.most = 0

    def looked(self, running: list[Running], _waiting: int) -> None:
        self.most = max(self.most, len(running))
        if self.interrupt and running and all((one.folder / "waiting").exists() for one in running):
            raise KeyboardInterrupt

    def started(self, job: Job, log: Path) -> None:
        assert log.name == f"seed{job.seed}.log"
        self.begun.append(f"{job.row.name}:{job.seed}")

    def finished(self, job: Job, _results: Mapping[str, Any]) -> None:
        self.done.append(f"{job.row.name}:{job.seed}")

    def failed(self, _job: Job, why: str) -> None:
        self.why.append(why)


def jobs_of(papers: Mapping[str, Paper], *targets: str, seeds: int = 1) -> list[Job]:
    return plan_jobs(papers, choose_rows(papers, targets), seeds=seeds)


def calls(recipes: Path, row: str) -> list[str]:
    path = recipes / f"{row}.calls"
    return path.read_text().splitlines() if path.exists() else []


# --- which rows, in which order -------------------------------------------------------------------------------------


def test_papers_are_folders_and_bases_are_no_rows(papers: dict[str, Paper]) -> None:
    assert {name: list(paper.rows) for name, paper in papers.items()} == {
        "smith": ["1-plain", "2-mean", "3-other"],
        "afterwards": ["one"],
    }
    assert papers["smith"].rows["2-mean"].reported.dev == {"sst": 0.5, "sts": 0.7}
    assert papers["smith"].claims.findings[1].kind == "no better"
    assert papers["afterwards"].claims.findings == ()


def test_the_most_telling_rows_come_first_and_more_seeds_last(papers: dict[str, Paper]) -> None:
    order = [f"{job.row.name}:{job.seed}" for job in jobs_of(papers, seeds=3)]
    assert order == [
        *("2-mean:1", "1-plain:1", "3-other:1", "one:1"),
        *("2-mean:2", "2-mean:3", "1-plain:2", "1-plain:3"),
        *("3-other:2", "one:2", "3-other:3", "one:3"),
    ]


def test_rows_by_name(papers: dict[str, Paper]) -> None:
    assert [row.key for row in choose_rows(papers, ["smith/3-other", "smith"])] == [
        "smith/3-other",
        "smith/1-plain",
        "smith/2-mean",
    ]
    with pytest.raises(MinbertError, match=r'no paper "smit" \(did you mean "smith"\?\); expected one of: smith, '):
        choose_rows(papers, ["smit"])
    with pytest.raises(MinbertError, match=r'smith has no row "2-meen" \(did you mean "2-mean"\?\)'):
        choose_rows(papers, ["smith/2-meen"])


def test_claims_about_rows_that_are_not_there(recipes: Path) -> None:
    path = recipes / "smith" / "findings.toml"
    path.write_text(path.read_text().replace('worse = "1-plain"', 'worse = "1-plane"'))
    with pytest.raises(MinbertError, match=r'findings.toml: no row "1-plane" \(did you mean "1-plain"\?\)'):
        find_papers(recipes)
    path.write_text('best = "2-mean"')
    with pytest.raises(MinbertError, match=r"findings.toml: no title; expected it"):
        find_papers(recipes)
    with pytest.raises(MinbertError, match=r"no recipes of papers"):
        find_papers(recipes / "smith")


# --- running --------------------------------------------------------------------------------------------------------


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


def test_a_setting_of_a_task_is_for_rows_that_have_it(
    papers: dict[str, Paper], recipes: Path, settings: Settings
) -> None:
    (recipes / "afterwards" / "one.toml").write_text(
        '[paper]\nrow = "One"\n[tasks.sst]\ntrain = "a.tsv"\ndev = "a.tsv"\n'
    )
    changed = replace(settings, sets=("tasks.sts.weight=2", "optimizer.lr=1e-4"))
    (one,), (mean,) = (jobs_of(papers, row) for row in ("afterwards/one", "smith/2-mean"))
    assert one.sets(changed) == ["optimizer.lr=1e-4"]
    assert [task.name for task in one.recipe(changed).tasks] == ["sst"]
    assert mean.recipe(changed).task("sts").weight == 2.0
    run_jobs([one], changed, Listener())
    assert json.loads(one.result(changed).read_text())["reproduction"]["set"] == ["optimizer.lr=1e-4"]
    assert is_done(one, changed)


@pytest.mark.parametrize("setting", ["tasks=3", "tasks", " tasks = 3"])
def test_a_setting_of_all_tasks_is_refused(papers: dict[str, Paper], settings: Settings, setting: str) -> None:
    (job,) = jobs_of(papers, "smith/2-mean")
    with pytest.raises(MinbertError) as found:
        run_jobs([job], replace(settings, sets=(setting,)), Listener())
    assert str(found.value) == f"--set {setting}: expected a task and its setting, such as tasks.sst.weight=2"


def test_models_are_kept_on_request(papers: dict[str, Paper], settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/2-mean")
    run_jobs([job], replace(settings, keep_models=True), Listener())
    assert (job.folder(settings) / "model").exists()
    assert not (job.folder(settings) / "checkpoints").exists()


def test_a_result_of_another_recipe_does_not_count(papers: dict[str, Paper], recipes: Path, settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/2-mean")
    run_jobs([job], settings, Listener())
    assert is_done(job, settings)
    for aside in ("train_sample=7", "checkpoint_every=1", "keep=1", "log_every=3"):  # change no score on dev
        assert is_done(job, replace(settings, sets=(f"training.{aside}",)))
    assert not is_done(job, replace(settings, steps_cap=3))
    assert not is_done(job, replace(settings, sets=("training.epochs=3",)))
    path = recipes / "smith" / "2-mean.toml"
    path.write_text('about = "said better"\n' + path.read_text().replace("A guess.", "A misprint."))
    assert is_done(job, settings)  # what is told of a row changes no run
    path.write_text(path.read_text().replace('pooling = "mean"', 'pooling = "max"'))
    assert not is_done(job, settings)
    job.result(settings).write_text("{")
    assert not is_done(job, settings)


def test_a_result_that_was_made_otherwise_stays_unless_it_may_be_replaced(
    papers: dict[str, Paper], recipes: Path, settings: Settings
) -> None:
    careful = replace(settings, replace=False)
    jobs = jobs_of(papers, "smith/1-plain", "smith/2-mean")
    run_jobs([job for job in jobs if job.row.name == "2-mean"], careful, Listener())
    changed = replace(careful, sets=("training.epochs=3",))
    run_jobs(jobs, changed, first := Listener())
    assert first.done == ["1-plain:1"], "only what has no result at all"
    assert [made_otherwise(job, changed) for job in jobs] == [["training.epochs: 3, was 2"], []]
    run_jobs(jobs, replace(changed, replace=True), second := Listener())
    assert second.done == ["2-mean:1"]
    assert [made_otherwise(job, changed) for job in jobs] == [[], []]


def notes_of(folder: Path, **kinds: str) -> dict[str, Any]:
    """What a run says of the files it has read."""
    return {
        split: {
            task: {"files": {f"{kind}-{split}.tsv": fingerprint(folder / f"{kind}-{split}.tsv")}}
            for task, kind in kinds.items()
        }
        for split in ("train", "dev")
    }


def test_a_result_from_other_files_does_not_count(
    papers: dict[str, Paper], settings: Settings, small_data: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(small_data, tmp_path / "data"))
    (job,) = jobs_of(papers, "smith/1-plain")
    run_jobs([job], settings, Listener())
    written(job, settings, data=notes_of(data, sst="sentiment", sts="similarity"))
    here = replace(settings, data=str(data))
    assert is_done(job, here)
    path = data / "similarity-dev.tsv"
    path.write_text(path.read_text() + "\n")
    assert made_otherwise(job, here) == ["similarity-dev.tsv is another file"]
    shutil.rmtree(data)
    assert is_done(job, here), "files that are not there cannot be asked"


def test_a_result_of_another_kind_of_head_does_not_count(papers: dict[str, Paper], settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/1-plain")
    run_jobs([job], settings, Listener())
    sets = ("tasks.sts.head=dpha", "model.common_layer=true")
    written(job, settings, recipe=as_dict(job.recipe(replace(settings, encoder="tiny", sets=sets))))
    now = replace(settings, sets=sets)
    assert made_otherwise(job, now) == ["dpha: revision 2, was 1", "common layer: revision 2, was 1"]
    written(job, settings, revisions={"dpha": 2, "common layer": 1})
    assert made_otherwise(job, now) == ["common layer: revision 2, was 1"]
    written(job, settings, revisions=revisions(job.recipe(now)))
    assert is_done(job, now)


def test_a_result_whose_stage_read_other_files_does_not_count(
    papers: dict[str, Paper], settings: Settings, small_data: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(small_data, tmp_path / "data"))
    here = replace(settings, data=str(data))
    (job,) = jobs_of(papers, "smith/1-plain")
    job.row.path.write_text(job.row.path.read_text() + STAGE)
    run_jobs([job], settings, Listener())
    steps = {"first": {"steps": 3, "data": notes_of(data, sst="sentiment")}}
    written(job, settings, data=notes_of(data, sst="sentiment", sts="similarity"), stages=steps)
    assert made_otherwise(job, here) == []
    steps["first"]["data"] = notes_of(data, sst="similarity")
    written(job, settings, stages=steps)
    assert made_otherwise(job, here) == ["sentiment-train.tsv is another file", "sentiment-dev.tsv is another file"]


def real_settings(settings: Settings, encoder: Path, data: Path, *sets: str) -> Settings:
    """That really train, for an epoch."""
    sets = ("training.epochs=1", *sets)
    real = replace(settings, encoder=str(encoder), data=str(data), device="cpu", sets=sets)
    return replace(real, trainer=Settings.trainer)


def test_a_run_from_other_files_or_of_another_head_begins_anew(
    papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(small_data, tmp_path / "data"))
    real = real_settings(settings, tiny_encoder, data, "tasks.sts.head=ph")
    (job,) = jobs_of(papers, "smith/1-plain")
    assert run_jobs([job], real, Listener()).done == [job]
    before = json.loads(job.result(real).read_text())
    assert before["revisions"] == {"ph": 2} and begun_otherwise(job, real) == []
    path = data / "similarity-dev.tsv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:9]))
    assert begun_otherwise(job, real) == ["similarity-dev.tsv is another file"]
    outcome = run_jobs([job], real, listener := Listener())
    assert (outcome.done, listener.why) == ([job], [])
    assert json.loads(job.result(real).read_text())["data"]["dev"]["sts"]["rows"] == 8
    begun = job.folder(real) / "begun.json"
    begun.write_text(begun.read_text().replace(weights_digest(tiny_encoder), "another"))
    assert begun_otherwise(job, real) == ["another encoder is called tiny now"]
    begun.unlink()  # as a run of before there were any
    assert begun_otherwise(job, real) == ["ph: revision 2, was 1"]
    (job.folder(real) / "recipe.toml").write_text("shape = 3\n")
    (why,) = begun_otherwise(job, real) or []
    assert "recipe.toml: no tasks" in why, "of a version whose recipes said other things"


def test_what_is_half_done_is_not_begun_anew_unless_asked_to(
    papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, small_data: Path
) -> None:
    sets = ("training.batch_size=1", "training.log_every=1", "tasks.sst.fraction=100")
    real = replace(real_settings(settings, tiny_encoder, small_data, *sets), replace=False)
    (job,) = jobs_of(papers, "smith/1-plain")
    assert run_jobs([job], real, Impatient(1)).stopped == [job]
    check_ready([job], real)
    other = replace(real, sets=(*real.sets, "optimizer.lr=1e-4"))
    with pytest.raises(MinbertError, match=r"begun otherwise has trained \(optimizer\.lr: 0\.0001, was .*--replace"):
        check_ready([job], other)
    check_ready([job], replace(other, replace=True))
    check_ready([job], replace(other, runs=real.runs / "other"))


@pytest.mark.parametrize(
    "left",
    [
        "checkpoints/step-00000003",
        "model",
        "stages/1-first/checkpoints/step-00000003",
        "stages/1-first/model",
        "runs/1001/checkpoints/step-00000003",
        "runs/1001/models/step-00000003",
    ],
)
def test_what_a_run_leaves_that_another_would_lose(
    left: str, papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, small_data: Path
) -> None:
    """Its own, of a stage, or of an ensemble's run; "half done" or kept with --keep-models."""
    (job,) = jobs_of(papers, "smith/1-plain")
    job.row.path.write_text(job.row.path.read_text() + STAGE)
    real = replace(real_settings(settings, tiny_encoder, small_data), replace=False)
    job.folder(real).mkdir(parents=True)
    write_started(job.folder(real), job.recipe(real), "the weights of another")
    check_ready([job], real)
    (job.folder(real) / left).mkdir(parents=True)
    with pytest.raises(MinbertError, match=r"another encoder is called tiny now.*--replace"):
        check_ready([job], real)
    check_ready([job], replace(real, replace=True))


def test_a_recipe_that_is_written_anew_while_it_is_run_is_not_what_was_run(
    papers: dict[str, Paper], settings: Settings
) -> None:
    (job,) = jobs_of(papers, "smith/3-other")
    script = Path(settings.trainer[1])
    editing = script.with_name("editing.py")
    editing.write_text(script.read_text() + 'recipe.write_text(recipe.read_text().replace("1e-4", "1e-3"))\n')
    run_jobs([job], replace(settings, trainer=(sys.executable, str(editing))), Listener())
    assert json.loads(job.result(settings).read_text())["recipe"]["optimizer"]["lr"] == 1e-4
    assert made_otherwise(job, settings) == ["optimizer.lr: 0.001, was 0.0001"]


def test_a_setting_of_a_stage_is_for_rows_that_have_it(papers: dict[str, Paper], settings: Settings) -> None:
    one, other = jobs_of(papers, "smith/1-plain", "smith/3-other")
    one.row.path.write_text(one.row.path.read_text() + STAGE)
    changed = replace(settings, sets=("stages.first.optimizer.lr=1e-4",))
    check_sets([one.row, other.row], changed.sets)
    assert other.sets(changed) == []
    assert one.recipe(changed).stages[0].optimizer.lr == 1e-4
    with pytest.raises(
        MinbertError, match=r'has stages\.frist \(did you mean "stages\.first"\?\); expected one of: stages'
    ):
        check_sets([one.row, other.row], ["stages.frist.optimizer.lr=1e-4"])
    with pytest.raises(MinbertError, match=r"expected a stage and its setting, such as stages\.simcse\.optimizer\.lr"):
        check_sets([one.row], ["stages=1"])


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


def written(job: Job, settings: Settings, **changes: Any) -> None:
    """Other figures in a result."""
    path = job.result(settings)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_run_that_no_cap_shortened_is_a_whole_one(papers: dict[str, Paper], settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/1-plain")
    capped = replace(settings, steps_cap=20)
    run_jobs([job], capped, Listener())
    assert not is_done(job, settings), "6 of 12 steps"
    written(job, capped, planned_steps=12)
    assert is_done(job, settings) and is_done(job, capped)
    assert is_done(job, replace(settings, steps_cap=12))
    assert not is_done(job, replace(settings, steps_cap=11)), "that one would be shorter"
    assert not is_done(job, replace(settings, sets=("training.epochs=3",)))


def test_a_stage_that_a_cap_shortened_is_not_whole() -> None:
    stages = [{"name": "first", "training": {"max_steps": 20}}]
    results: dict[str, Any] = {"planned_steps": 12, "whole_steps": 12, "recipe": {"stages": stages}}
    assert not was_cut({**results, "stages": {"first": {"steps": 19}}})
    assert was_cut({**results, "stages": {"first": {"steps": 20}}})
    assert longest_part({**results, "stages": {"first": {"steps": 19}}}) == 19
    assert longest_part({**results, "whole_steps": 60, "recipe": {"ensemble": {"runs": 2}}}) == 30


def test_whole_runs_and_runs_within_the_cap_are_compared(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    """Rows that were run under a cap which did not touch them, and others without one."""
    plain, mean = ([job for job in jobs_of(papers, seeds=2) if job.row.name == name] for name in ("1-plain", "2-mean"))
    run_jobs(plain, replace(settings, steps_cap=20), Listener())
    run_jobs(mean, settings, Listener())
    for job in (*plain, *mean):
        written(job, settings, planned_steps=12)
    page = build_page(papers, load_results(papers, settings.results), tmp_path)
    assert "All of them: whole runs." in page and "thinned" not in page
    assert "| tiny | 2 of 4 | 4 | 1 | 1 | 0 | 0 |" in page
    for job in plain:  # and now beside one that was shortened
        written(job, settings, planned_steps=6)
    page = build_page(papers, load_results(papers, settings.results), tmp_path)
    assert "All of them: at most 20 steps a run." in page and "thinned" in page


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


class Impatient(Listener):
    """Presses Ctrl-C as soon as a run has logged a step beyond this one."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def looked(self, running: list[Running], _waiting: int) -> None:
        if running and running[0].last_record().get("step", 0) > self.step:
            raise KeyboardInterrupt


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


def test_a_row_with_more_epochs_goes_on_from_the_end_of_the_other(recipes: Path, settings: Settings) -> None:
    (recipes / "smith" / "4-longer.toml").write_text(LONGER)
    steady, listener = replace(settings, sets=STEADY, jobs=4), Listener()
    run_jobs(jobs_of(find_papers(recipes), "smith/4-longer", "smith/2-mean", seeds=2), steady, listener)
    assert listener.most == 2  # those of four epochs wait
    assert sorted(listener.done) == ["2-mean:1", "2-mean:2", "4-longer:1", "4-longer:2"]
    assert [call.split()[-1] for call in calls(recipes, "smith/2-mean")] == ["--overwrite"] * 2
    assert [call.split()[-1] for call in calls(recipes, "smith/4-longer")] == ["--resume"] * 2


@pytest.mark.parametrize("why", ["the rate falls", "the other is done", "the other fails"])
def test_a_row_with_more_epochs_has_a_run_of_its_own_where_it_must(recipes: Path, settings: Settings, why: str) -> None:
    (recipes / "smith" / "4-longer.toml").write_text(LONGER)
    papers, steady = find_papers(recipes), replace(settings, sets=() if why == "the rate falls" else STEADY)
    if why == "the other is done":
        run_jobs(jobs_of(papers, "smith/2-mean"), steady, Listener())
    elif why == "the other fails":
        (recipes / "smith" / "2-mean.fails").touch()
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


NOT_READY: dict[str, tuple[dict[str, Any], str]] = {
    "no encoder": ({"encoder": "no-such"}, 'no encoder "no-such"; expected a folder, a hub id or one of: '),
    "no weights": ({"encoder": "EMPTY"}, "no model.safetensors"),
    "no data": ({"data": "nowhere"}, "no file nowhere/sentiment-train.tsv; say where the data is with --data DIR"),
    "no device": ({"device": "tpu9"}, 'device is "tpu9"; expected auto, cpu, cuda or cuda:N'),
    "no task": ({"set": "tasks=3"}, "--set tasks=3: expected a task and its setting, such as tasks.sst.weight=2"),
    "no row's task": (
        {"set": "tasks.stz.weight=2"},
        '--set tasks.stz.weight=2: none of these rows has tasks.stz (did you mean "tasks.sts"?); expected one of: tasks.sst, tasks.sts',
    ),
    "an option": (
        {"set": "model.encoder=mpnet"},
        "--set model.encoder=mpnet: expected --encoder instead, which is recorded with each result",
    ),
    "a row's name": (
        {"set": "name=x"},
        "--set name=x: is what a row is called; expected something that it trains with",
    ),
    "a file for a folder": (
        {"runs": "taken"},
        "taken: cannot be written (File exists); expected a folder to write into",
    ),
    "a result that is none": (
        {"results": "damaged"},
        "seed9.json: no dev, overall, data, environment, recipe, seconds, reproduction.set, reproduction.steps_cap; expected",
    ),
}


@pytest.mark.parametrize("mistake", NOT_READY)
def test_what_would_stop_every_run_is_said_once_and_before_any(
    mistake: str,
    recipes: Path,
    tmp_path: Path,
    tiny_encoder: Path,
    small_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = Path(shutil.copytree(tiny_encoder, tmp_path / "empty"))
    (empty / "model.safetensors").unlink()
    wrong, message = NOT_READY[mistake]
    given = {"encoder": tiny_encoder, "data": small_data, "device": "cpu", **wrong}
    given |= {"encoder": empty} if wrong.get("encoder") == "EMPTY" else {}
    (tmp_path / "taken").touch()
    damaged = tmp_path / "damaged" / "tiny" / "smith" / "3-other" / "seed9.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{}")
    places = {name: tmp_path / name for name in ("results", "runs", "page")}
    options = [word for key, value in {"recipes": recipes, **places, **given}.items() for word in (f"--{key}", value)]

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minbert", "reproduce", "smith", *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("error: ") and message in said.err
    assert not any(place.exists() for name, place in places.items() if name not in wrong), "neither a run nor a page"


def test_what_a_stage_needs_and_what_a_task_borrows_is_looked_for(
    papers: dict[str, Paper], recipes: Path, settings: Settings, tiny_encoder: Path, small_data: Path
) -> None:
    real = replace(settings, encoder=str(tiny_encoder), data=str(small_data), device="cpu")
    (job,) = jobs_of(papers, "smith/1-plain")
    check_ready([job], real)
    row = job.row.path.read_text()
    job.row.path.write_text(row + '[[stages]]\n[stages.tasks.sst]\ntrain = "first.tsv"\ndev = "sentiment-dev.tsv"\n')
    with pytest.raises(MinbertError, match=r"no file .*first\.tsv"):
        check_ready([job], real)
    job.row.path.write_text(row + '[tasks.sts.borrow]\ntask = "quora"\nlow = 5\nhigh = 5\n')
    with pytest.raises(MinbertError, match=r"no file .*quora"):
        check_ready([job], real)


def test_a_package_that_pooling_needs_is_looked_for(
    papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = replace(settings, encoder=str(tiny_encoder), data=str(small_data), device="cpu")
    (job,) = jobs_of(papers, "smith/1-plain")
    weighted = replace(real, sets=("tasks.sts.pooling=weighted", "model.pooling_weights={verb=2}"))
    check_ready([job], weighted)
    monkeypatch.setitem(sys.modules, "textblob", None)
    check_ready([job], real)
    with pytest.raises(MinbertError, match=r'pooling "weighted" needs textblob'):
        check_ready([job], weighted)


def test_what_would_keep_the_page_from_being_written_is_said_before_any_run(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_page(tmp_path / "docs" / "page.md")
    with pytest.raises(MinbertError, match=r"docs: is a folder; expected a file for the page, such as .*docs/page.md"):
        check_page(tmp_path / "docs")
    (tmp_path / "file").touch()
    with pytest.raises(MinbertError, match=r"file: cannot be written \(.*\); expected a folder to write into"):
        check_page(tmp_path / "file" / "page.md")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"needs matplotlib.*minbert\[report\]"):
        check_page(tmp_path / "docs" / "page.md")


@pytest.mark.parametrize(("text", "found"), [("{}", "no dev, overall"), ("[1]", "no dev"), ("{", "not JSON")])
def test_a_file_that_is_no_result_is_named(papers: dict[str, Paper], settings: Settings, text: str, found: str) -> None:
    (job,) = jobs_of(papers, "smith/1-plain")
    job.result(settings).parent.mkdir(parents=True)
    job.result(settings).write_text(text)
    with pytest.raises(MinbertError, match=rf"seed1.json: {found}.*; expected what minbert reproduce wrote"):
        load_results(papers, settings.results)


def test_nothing_is_needed_for_what_is_done(papers: dict[str, Paper], settings: Settings) -> None:
    jobs = jobs_of(papers, "smith")
    run_jobs(jobs, settings, Listener())
    check_ready(jobs, settings)  # its encoder and its data are nowhere


# --- findings -------------------------------------------------------------------------------------------------------


@pytest.mark.parity
def test_the_interval_is_scipys() -> None:
    from scipy import stats

    assert pytest.approx([stats.t.ppf(0.975, freedom) for freedom in range(1, 21)], abs=1e-6) == T975
    values = (0.012, 0.031, -0.004, 0.02)
    found = Difference("sst", values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high))
    many = np.random.default_rng(1).normal(size=400)
    for count in (21, 22, 60, 400):  # from 22 on a series instead of the table
        reach = stats.t.ppf(0.975, count - 1) * stats.sem(many[:count])
        assert t_reach(many[:count]) == pytest.approx(reach, rel=2e-4)
    assert t_reach([0.3]) == float("inf")


def by_seed(*values: float, **others: float) -> dict[int, dict[str, float]]:
    return {seed: {"sst": value, "mean": value / 2, **others} for seed, value in enumerate(values, start=1)}


@pytest.mark.parametrize(
    ("better", "word", "no_better"),
    [
        ((0.52, 0.53, 0.54), "held", "did not hold"),  # +.02 each time: the interval is a point
        ((0.51, 0.53, 0.55), "undecided", "undecided"),  # +.01, +.02, +.03: .02 ± .0248
        ((0.48, 0.49, 0.50), "did not hold", "held"),
        ((0.501, 0.510, 0.519), "undecided", "held"),  # +.001, 0, -.001: surely less than a point
        ((0.60,), "undecided", "undecided"),  # one seed
        ((), "not compared", "not compared"),
    ],
)
def test_verdicts_worked_by_hand(better: tuple[float, ...], word: str, no_better: str) -> None:
    worse = by_seed(0.50, 0.51, 0.52)
    finding = Finding("a claim", "b", "w", "sst")
    assert judge(finding, by_seed(*better), worse).word == word
    assert judge(replace(finding, kind="no better"), by_seed(*better), worse).word == no_better


def test_only_seeds_that_both_rows_have_are_compared() -> None:
    better = {2: {"sst": 0.7}, 3: {"sst": 0.8}, 5: {"sst": 0.1}}
    (found,) = judge(Finding("", "b", "w", "sst"), better, by_seed(0.5, 0.6, 0.6, 0.6)).differences
    assert found.values == pytest.approx((0.1, 0.2))


def test_every_task_holds_only_if_each_does() -> None:
    finding = Finding("", "b", "w", "every task")
    worse = by_seed(0.5, 0.5, sts=0.3)
    assert judge(finding, by_seed(0.6, 0.6, sts=0.4), worse).word == "held"
    verdict = judge(finding, by_seed(0.6, 0.6, sts=0.2), worse)
    assert ([one.on for one in verdict.differences], verdict.word) == (["sst", "sts"], "did not hold")
    assert judge(finding, {}, worse).word == "not compared"


def test_scores_of_a_result() -> None:
    dev = {
        "sst": {"metric": "accuracy", "metrics": {"accuracy": {"value": 0.5}, "ece": {"value": 0.1}}},
        "sts": {"metric": "pearson", "metrics": {"pearson": {"value": None}}},
    }
    found = scores_of({"dev": dev, "overall": {"2023": 0.25, "2024": 0.5}}, "2024")
    assert found == {"sst": 0.5, "sts": 0.0, "mean": 0.5}


# --- the page -------------------------------------------------------------------------------------------------------


def test_what_a_paper_does_not_print_over_all_follows_from_its_three_scores(recipes: Path, tmp_path: Path) -> None:
    """On the page's line of the finding: 2-mean over 1-plain."""

    def theirs(plain: str, mean: str) -> str:
        for name, table in (("1-plain", plain), ("2-mean", mean)):
            (recipes / "smith" / f"{name}.toml").write_text(f'base = "common.toml"\n[paper]\nrow = "R"\n{table}\n')
        page = build_page(find_papers(recipes), load_results({}, tmp_path), tmp_path)
        return next(line for line in page.splitlines() if line.startswith("| The mean is better.")).split(" | ")[2]

    scores = "dev = { sst = 0.4, quora = 0.6, sts = 0.2 }"
    assert theirs(scores, "overall = { dev = 0.5 }") == "+0.100"
    assert theirs(scores + "\nrule = '2024'", "overall = { dev = 0.5 }") == "-0.033", "r counts as (r + 1) / 2"
    assert theirs(scores, "dev = { sst = 0.4, quora = 0.7, sts = 0.2 }") == "+0.033"
    assert theirs("dev = { sst = 0.4, quora = 0.6 }", "overall = { dev = 0.5 }") == ""
    assert theirs("dev = { sst = 0.4, quora = 0.6, cfimdb = 0.9 }", "overall = { dev = 0.5 }") == ""


def test_the_page_has_their_numbers_ours_and_what_was_not_run(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    jobs = [job for job in jobs_of(papers, seeds=2) if job.row.name in ("1-plain", "2-mean")]
    run_jobs(jobs, replace(settings, steps_cap=6, sets=("optimizer.lr=1e-4",)), Listener())
    page = build_page(papers, load_results(papers, settings.results), tmp_path)
    lines = page.splitlines()
    (mean,) = [line for line in lines if "recipes/smith/2-mean.toml)**" in line]
    assert mean.split(" | ")[1:] == [
        *("0.500", "0.402 ± 0.001", "0.700", "0.402 ± 0.001", "0.600", "0.402 ± 0.001"),
        *("2", "6 of 12 |"),
    ]
    assert "Not run: `3-other`." in page
    assert "All of them: at most 6 steps a run, `optimizer.lr=1e-4`." in lines
    assert "4 runs, 0.0 hours of training on abacus; commit abc." in lines
    assert "| tiny | 2 of 4 | 4 | 1 | 1 | 0 | 0 |" in lines  # +.1 for each seed: better, so not "no better"
    (item,) = [line for line in lines if line.startswith("- The mean is better.")]
    assert item == "- The mean is better. `smith`: overall +0.100 (+0.100 to +0.100)"
    assert lines[lines.index(item) - 2] == "With tiny held:" and "With tiny did not hold:" in lines
    (finding,) = [line for line in lines if line.startswith("| The mean is better.")]
    assert finding.split(" | ")[1:] == ["overall", "+0.150", "+0.100 (+0.100 to +0.100)", "2", "**held** |"]
    assert "Their test scores of [Mean](recipes/smith/2-mean.toml): SST 0.510, overall 0.610." in page
    assert "- [Mean](recipes/smith/2-mean.toml): A guess." in lines
    assert "**Not run yet.**" in page  # the other folder
    assert "(section 3; `2-mean` over `1-plain`, by `model.pooling`)" in finding
    assert "Overall: the mean of the three scores." in lines


def test_links_lead_from_where_the_page_lies(papers: dict[str, Paper], tmp_path: Path) -> None:
    page = build_page(papers, {}, tmp_path / "some" / "where")
    assert {link.removeprefix("../../recipes/") for link in re.findall(r"\]\((.+?)\)", page)} == {
        *("README.md", "smith/1-plain.toml", "smith/2-mean.toml", "smith/3-other.toml", "afterwards/one.toml")
    }


def test_the_page_says_what_concerns_all_rows_of_a_paper(
    recipes: Path, settings: Settings, papers: dict[str, Paper], tmp_path: Path
) -> None:
    path = recipes / "smith" / "findings.toml"
    path.write_text(path.read_text().replace("best =", 'notes = ["A sigmoid is assumed."]\nbest ='))
    for row in ("1-plain", "2-mean", "3-other"):
        place = recipes / "smith" / f"{row}.toml"
        place.write_text(place.read_text().replace("[paper]\n", '[paper]\nrule = "2024"\n'))
    run_jobs(jobs_of(papers, "smith"), settings, Listener())
    for row, size in {"1-plain": 60, "2-mean": 60, "3-other": 120}.items():
        rows = {"sts": {"rows": size}, "sst": {"rows": 50}}
        written(jobs_of(papers, f"smith/{row}")[0], settings, data={"train": rows})
    again = find_papers(recipes)
    page = build_page(again, load_results(again, settings.results), tmp_path)
    assert "- A sigmoid is assumed." in page
    assert "r counts as (r + 1) / 2." in page
    assert "Training rows, by row: STS 60 or 120, SST 50." in page


def test_steps_of_stages_are_counted_apart_and_vectors_are_described(
    papers: dict[str, Paper], recipes: Path, settings: Settings, tmp_path: Path
) -> None:
    path = recipes / "smith" / "2-mean.toml"
    stage = '[[stages]]\nname = "first"\n[stages.tasks.mine]\nkind = "contrastive"\ntrain = "a.tsv"\ndev = "a.tsv"\n'
    path.write_text(path.read_text() + stage)
    run_jobs(jobs_of(papers, "smith", seeds=2), settings, Listener())
    for row, values in {"1-plain": (0.3, -1.0), "2-mean": (0.1, -3.0), "3-other": (0.2, -2.0)}.items():
        found = dict(zip(("alignment", "uniformity"), values, strict=True), vectors="mean")
        for job in jobs_of(papers, f"smith/{row}", seeds=2):
            written(job, settings, geometry={"sts": found}, stages={"first": {"steps": 489}} if row == "2-mean" else {})
    lines = build_page(papers, load_results(papers, settings.results), tmp_path).splitlines()
    (mean,) = [line for line in lines if "recipes/smith/2-mean.toml)**" in line]
    assert mean.endswith("| 2 | 489 + 6 of 12 |")
    described = [line for line in lines if line.endswith(" ± 0.000 |")]
    assert described == [  # the one with the stage, and the row it was built on
        "| 1-plain | STS | mean | 0.300 ± 0.000 | -1.000 ± 0.000 |",
        "| 2-mean | STS | mean | 0.100 ± 0.000 | -3.000 ± 0.000 |",
    ]
    alone = recipes / "afterwards" / "one.toml"
    alone.write_text(alone.read_text() + 'after = "smith/1-plain"\n' + stage)
    papers = find_papers(recipes)
    for job in jobs_of(papers, "afterwards"):
        run_jobs([job], settings, Listener())
        written(job, settings, geometry={"sts": found})
    beyond = build_page(papers, load_results(papers, settings.results), tmp_path).partition("## Beyond")[2]
    assert "| smith/1-plain | STS | mean | 0.300" in beyond, "a row that stands elsewhere has its paper's name"


def test_runs_that_differ_in_what_was_scored_or_written_beside_are_compared(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    jobs = jobs_of(papers, "smith", seeds=2)
    run_jobs([job for job in jobs if job.row.name == "1-plain"], settings, Listener())
    aside = replace(settings, sets=("training.train_sample=0", "training.checkpoint_every=5"))
    run_jobs([job for job in jobs if job.row.name == "2-mean"], aside, Listener())
    page = build_page(papers, load_results(papers, settings.results), tmp_path)
    assert "| tiny | 2 of 4 | 4 | 1 | 1 | 0 | 0 |" in page
    assert "train_sample" not in page and "checkpoint_every" not in page


def test_a_claim_about_a_pretrained_pooler_is_not_compared_with_an_encoder_that_has_none(
    recipes: Path, settings: Settings, tmp_path: Path
) -> None:
    path = recipes / "smith" / "findings.toml"
    path.write_text(path.read_text().replace('on = "mean"', 'on = "mean"\nneeds_pooler = true'))
    papers = find_papers(recipes)
    judged, not_judged = "| 1 | 1 | 0 | 0 |", "| 0 | 1 | 0 | 1 |"
    cases = [
        ("bert", None, judged),
        ("minilm", None, not_judged),
        ("mini", True, not_judged),
        ("minilm", False, judged),
    ]
    for number, (encoder, untrained, counts) in enumerate(cases):
        here = replace(settings, encoder=encoder, results=tmp_path / str(number))
        jobs = jobs_of(papers, "smith/1-plain", "smith/2-mean", seeds=2)
        run_jobs(jobs, here, Listener())
        for job in jobs if untrained is not None else ():  # older results do not say it
            written(job, here, untrained_pooler=untrained)
        page = build_page(papers, load_results(papers, here.results), tmp_path)
        assert f"| {encoder} | 2 of 4 | 4 {counts}" in page
        told = [line for line in page.splitlines() if "not compared**: the encoder lacks a trained pooler" in line]
        assert len(told) == (counts == not_judged)
        assert all(re.search(r"\| [+-]0\.\d{3} \([+-]\d\.\d{3} to [+-]\d\.\d{3}\) \| 2 \|", line) for line in told)


def test_ensembles_whose_seeds_share_a_training_are_not_compared(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    jobs = jobs_of(papers, "smith/1-plain", "smith/2-mean", seeds=2)
    run_jobs(jobs, settings, Listener())

    def told() -> str:
        page = build_page(papers, load_results(papers, settings.results), tmp_path)
        return next(line for line in page.splitlines() if line.startswith("| The mean is better."))

    for second in (2, 1001):
        for job in (job for job in jobs if job.row.name == "2-mean"):
            members = [{"seed": job.seed}, {"seed": job.seed + second - 1}]
            written(job, settings, members=members)
        assert ("**not compared**: seeds of `2-mean` share trainings" in told()) == (second == 2)
        assert "| +0.100 (+0.100 to +0.100) | 2 | **" in told(), "the figures are shown all the same"


def test_another_encoder_of_the_same_name_does_not_count(
    papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, tmp_path: Path
) -> None:
    """Its own copy does, in half precision too, and so does a result of before results said it."""
    place = tmp_path / "home" / "tiny"
    shutil.copytree(tiny_encoder, place)
    here = replace(settings, encoder=str(place))
    job, other = jobs_of(papers, "smith/1-plain", "smith/2-mean")
    run_jobs([job, other], here, Listener())
    assert is_done(job, here)
    written(job, here, encoder_weights=weights_digest(place))
    assert is_done(job, here)
    tensors = load_file(place / "model.safetensors")
    save_file({name: value.half() for name, value in tensors.items()}, place / "model.safetensors")
    assert is_done(job, replace(here)), "settings remember what they have read"
    tensors["embeddings.word_embeddings.weight"] *= 1.5
    save_file(tensors, place / "model.safetensors")
    assert made_otherwise(job, replace(here)) == ["another encoder is called tiny now"]
    assert is_done(job, replace(here, encoder="elsewhere/tiny")), "one that is not there cannot be asked"
    written(other, here, encoder_weights=weights_digest(place))
    page = build_page(papers, load_results(papers, here.results), tmp_path)
    assert "| tiny | 2 of 4 | 2 | 0 | 0 | 0 | 2 |" in page


def test_an_ensemble_of_other_seeds_does_not_count(papers: dict[str, Paper], settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/2-mean")
    of_two = replace(settings, sets=("ensemble.runs=2", "ensemble.models=3"))
    run_jobs([job], of_two, Listener())
    written(job, of_two, members=[{"seed": 1001}, {"seed": 1}, {"seed": 1}])
    assert is_done(job, of_two)
    written(job, of_two, members=[{"seed": 1}] * 3)
    assert is_done(job, of_two), "the best three may be of one run"
    written(job, of_two, members=[{"seed": 1}, {"seed": 2}, {"seed": 2}])
    assert made_otherwise(job, of_two) == ["seeds of the ensemble's runs: 1, 1001, was 1, 2"]


def test_a_setting_that_the_recipe_now_says_itself_is_no_condition(
    papers: dict[str, Paper], recipes: Path, settings: Settings, tmp_path: Path
) -> None:
    jobs = jobs_of(papers, "smith/1-plain", "smith/2-mean", seeds=2)
    chosen = ("training.dev_sample=4",)
    run_jobs([job for job in jobs if job.row.name == "1-plain"], replace(settings, sets=chosen), Listener())
    path = recipes / "smith" / "common.toml"
    path.write_text(path.read_text() + "dev_sample = 4\n")
    run_jobs([job for job in jobs if job.row.name == "2-mean"], settings, Listener())
    for job in jobs:
        written(job, settings, planned_steps=12)
    page = build_page(papers, load_results(papers, settings.results), tmp_path)
    assert "| tiny | 2 of 4 | 4 | 1 | 1 | 0 | 0 |" in page
    assert "All of them: whole runs." in page and "dev_sample=4`" not in page


def test_runs_under_different_conditions_are_shown_but_not_compared(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    jobs = jobs_of(papers, "smith", seeds=2)
    run_jobs([job for job in jobs if job.row.name == "1-plain"], settings, Listener())
    run_jobs([job for job in jobs if job.row.name == "2-mean"], replace(settings, steps_cap=6), Listener())
    page = build_page(papers, load_results(papers, settings.results), tmp_path)
    assert "- whole runs: `1-plain`" in page
    assert "- at most 6 steps a run: `2-mean`" in page
    assert "| tiny | 2 of 4 | 4 | 0 | 0 | 0 | 2 |" in page


def test_rows_that_were_not_both_run_or_share_no_seed_are_not_compared(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    plain, mean = (jobs_of(papers, f"smith/{name}", seeds=2) for name in ("1-plain", "2-mean"))
    for jobs in (plain[:1], mean[1:]):
        run_jobs(jobs, settings, Listener())
        page = build_page(papers, load_results(papers, settings.results), tmp_path)
        (counts,) = [line for line in page.splitlines() if line.startswith("| tiny |")]
        assert counts.endswith("| 0 | 0 | 0 | 2 |")
    said = " ".join(page.split())
    assert "**not compared** where one of its rows was not run or the two have no seed in common, where not all" in said
    assert "same settings or caps of several sizes shortened them, and where one of the two was not made by its" in said


def test_rows_that_a_cap_cut_differently_decide_nothing(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    jobs = [job for job in jobs_of(papers, seeds=2) if job.row.name in ("1-plain", "2-mean")]
    capped = replace(settings, steps_cap=6)
    run_jobs(jobs, capped, Listener())
    cut = "**not compared**: the cap left 50% of `2-mean` and 86% of `1-plain`"
    for whole, verdict in ((7, cut), (12, "**held**"), (10, "**held**")):  # six steps of so many, against six of twelve
        for job in jobs:
            if job.row.name == "1-plain":
                written(job, capped, whole_steps=whole)
        page = build_page(papers, load_results(papers, settings.results), tmp_path)
        (finding,) = [line for line in page.splitlines() if line.startswith("| The mean is better.")]
        assert finding.endswith(f"| {verdict} |")
        assert ("With tiny held:" in page) == (verdict != cut)


def test_a_whole_run_is_not_compared_with_one_that_a_cap_shortened(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    """One seed of one row is whole, all others are cut: in the row as a whole the least that was left is the same."""
    jobs, capped = jobs_of(papers, "smith/1-plain", "smith/2-mean", seeds=3), replace(settings, steps_cap=6)
    run_jobs(jobs, capped, Listener())
    page = build_page(papers, load_results(papers, settings.results), tmp_path)
    assert "| tiny | 2 of 4 | 6 | 1 | 1 | 0 | 0 |" in page
    for seed in (1, 3):
        (whole,) = (job for job in jobs if (job.row.name, job.seed) == ("2-mean", seed))
        written(whole, capped, planned_steps=12)
        page = build_page(papers, load_results(papers, settings.results), tmp_path)
        assert "| tiny | 2 of 4 | 6 | 0 | 0 | 0 | 2 |" in page
        assert "**not compared**: the cap left 100% of `2-mean` and 50% of `1-plain`" in page
        written(whole, capped, planned_steps=6)


def test_a_row_of_which_a_stage_was_cut_is_not_compared_with_one_that_has_none(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    jobs = jobs_of(papers, "smith/1-plain", "smith/2-mean", seeds=2)
    run_jobs(jobs, replace(settings, steps_cap=12), Listener())
    for job in jobs:
        written(job, settings, planned_steps=12)
    means = [job for job in jobs if job.row.name == "2-mean"]
    for planned, cut in ((20, False), (5, True)):
        for job in means:
            written(job, settings, stages={"first": {"steps": planned, "planned_steps": planned, "whole_steps": 20}})
        page = build_page(papers, load_results(papers, settings.results), tmp_path)
        assert ("**not compared**: the cap left 25% of `2-mean` and 100% of `1-plain`" in page) == cut


def test_rows_from_files_of_one_name_and_other_content_are_not_compared(
    papers: dict[str, Paper], settings: Settings
) -> None:
    jobs = jobs_of(papers, "smith/1-plain", "smith/2-mean", seeds=2)
    run_jobs(jobs, settings, Listener())
    results = load_results(papers, settings.results)
    assert [verdict.seeds for verdict in verdicts(papers["smith"], results["tiny"])] == [2, 2]
    found = json.loads(jobs[0].result(settings).read_text())["data"]
    found["train"]["sst"]["files"] = {"sst.tsv": "another"}
    written(jobs[0], settings, data=found)
    results = load_results(papers, settings.results)
    assert [verdict.seeds for verdict in verdicts(papers["smith"], results["tiny"])] == [0, 0]


def test_a_setting_that_one_row_has_by_itself_does_not_part_it_from_the_other(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    def page() -> str:
        return build_page(papers, load_results(papers, settings.results), tmp_path)

    jobs = jobs_of(papers, "smith/1-plain", "smith/2-mean", seeds=2)
    run_jobs(jobs, replace(settings, sets=("model.pooling=mean",)), Listener())
    assert "| tiny | 2 of 4 | 4 | 1 | 0 | 1 | 0 |" in page(), "compared: they are the same then"
    assert "All of them: whole runs, `model.pooling=mean`." in page()
    means = [job for job in jobs if job.row.name == "2-mean"]
    run_jobs(means, settings, Listener())
    assert "| tiny | 2 of 4 | 4 | 1 | 0 | 1 | 0 |" in page(), "without it that row is the same"
    run_jobs(means, replace(settings, sets=("optimizer.lr=1e-4",)), Listener())
    assert "| tiny | 2 of 4 | 4 | 0 | 0 | 0 | 2 |" in page()


def test_a_file_beside_the_results_is_no_result(papers: dict[str, Paper], settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/1-plain")
    run_jobs([job], settings, Listener())
    shutil.copy(job.result(settings), job.result(settings).with_name("seed1-old.json"))
    assert [*load_results(papers, settings.results)["tiny"]["smith/1-plain"].by_seed] == [1]


def test_a_task_that_only_one_row_has_is_one_thing_that_differs(recipes: Path, tmp_path: Path) -> None:
    more = '[tasks.quora]\ntrain = "pairs.tsv"\ndev = "pairs.tsv"\n'
    (recipes / "smith" / "4-more.toml").write_text(f'base = "common.toml"\n[paper]\nrow = "More"\n{more}')
    path = recipes / "smith" / "findings.toml"
    path.write_text(path.read_text().replace('worse = "1-plain"', 'worse = "4-more"', 1))
    page = build_page(find_papers(recipes), {}, tmp_path)
    assert "(section 3; `2-mean` over `4-more`, by `model.pooling`, `tasks.quora`)" in page


def test_rows_that_answer_one_class_almost_always_say_so(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    jobs = jobs_of(papers, "smith/1-plain", "smith/2-mean", seeds=2)
    run_jobs(jobs, settings, Listener())
    matrices = {  # a column is an answer; 39 of 40 are the same in the first two, 38 and 20 in the others
        "1-plain:1": [[0, 20], [1, 19]],
        "1-plain:2": [[39, 0], [1, 0]],
        "2-mean:1": [[20, 1], [18, 1]],
        "2-mean:2": [[0, 20], [20, 0]],
    }
    for job in jobs:
        dev = json.loads(job.result(settings).read_text())["dev"]
        dev["sst"]["confusion"] = matrices[f"{job.row.name}:{job.seed}"]
        written(job, settings, dev=dev)
    page = build_page(papers, load_results(papers, settings.results), tmp_path)
    (line,) = [line for line in page.splitlines() if line.startswith("Answers one class")]
    assert line == "Answers one class of SST almost always (97.5% of dev or more): `1-plain` (2 of 2 seeds)."


def test_a_row_of_no_paper_is_shown_beside_the_one_it_was_built_on(
    recipes: Path, settings: Settings, tmp_path: Path
) -> None:
    def cells(row: str) -> list[str]:
        """The row of the page's table, without its name."""
        page = build_page(papers, load_results(papers, settings.results), tmp_path)
        (line,) = [line for line in page.splitlines() if line.startswith(f"| [{row}](")]
        return line.split(" | ")[1:]

    built_on_mean, path = '[paper]\nrow = "One"\nafter = "smith/2-mean"\n', recipes / "afterwards" / "one.toml"
    path.write_text('base = "../smith/common.toml"\n' + built_on_mean)
    base = recipes / "smith" / "2-mean.toml"
    base.write_text(base.read_text().replace("[paper]\n", '[paper]\nrule = "2024"\n'))
    papers = find_papers(recipes)
    ones, means = jobs_of(papers, "afterwards/one", seeds=2), jobs_of(papers, "smith/2-mean", seeds=3)
    run_jobs(ones, settings, Listener())
    scores = ["0.301 ± 0.001"] * 3  # of two tasks and overall
    link = "[smith/2-mean](recipes/smith/2-mean.toml)"
    assert cells("One") == [link, *scores, "", "2", "6 of 12 |"]
    run_jobs(means, settings, Listener())
    for job, overall in zip(means, (0.400, 0.421, 0.900), strict=True):
        written(job, settings, overall={"2023": overall, "2024": 0.0})
    assert cells("One")[4] == "-0.109"  # .301 - .400 and .302 - .421: the row's own rule, the seeds that both have
    assert len(cells("Plain")) == 8  # what a paper has is compared by its findings
    written(means[0], settings, dev={})
    assert cells("One")[4] == "-0.119"  # an overall of other tasks is another thing
    run_jobs(ones, replace(settings, sets=("optimizer.lr=1e-4",)), Listener())
    assert cells("One")[4] == ""
    run_jobs(ones, settings, Listener())
    assert cells("One")[4] == "-0.119"
    path.write_text('base = "../smith/2-mean.toml"\n' + built_on_mean)
    papers = find_papers(recipes)
    assert cells("One")[4] == ""


def test_rows_with_the_same_scores_say_so(papers: dict[str, Paper], settings: Settings, tmp_path: Path) -> None:
    """An interval from 0 to 0 would look like a mistake."""
    jobs = [job for job in jobs_of(papers, seeds=2) if job.row.name in ("1-plain", "2-mean")]
    run_jobs(jobs, settings, Listener())
    for job in jobs:
        written(job, settings, overall={"2023": 0.4, "2024": 0.4})
    page = build_page(papers, load_results(papers, settings.results), tmp_path)
    (finding,) = [line for line in page.splitlines() if line.startswith("| The mean is better.")]
    assert finding.split(" | ")[3:] == ["0: the same score with every seed", "2", "**undecided** |"]


def test_results_of_an_older_recipe_are_marked(
    papers: dict[str, Paper], recipes: Path, settings: Settings, tmp_path: Path
) -> None:
    run_jobs(jobs_of(papers, "smith/1-plain"), settings, Listener())
    assert "Made before" not in build_page(papers, load_results(papers, settings.results), tmp_path)
    path = recipes / "smith" / "common.toml"
    path.write_text(path.read_text().replace("epochs = 2", "epochs = 3"))
    page = build_page(papers, load_results(papers, settings.results), tmp_path)
    assert "Made before the recipe, or a head that it names, was last changed: `1-plain`." in page


def test_results_of_older_recipes_are_not_compared(papers: dict[str, Paper], recipes: Path, settings: Settings) -> None:
    def seeds() -> list[int]:
        return [verdict.seeds for verdict in verdicts(papers["smith"], load_results(papers, settings.results)["tiny"])]

    jobs = jobs_of(papers, "smith/1-plain", "smith/2-mean", seeds=2)
    run_jobs(jobs, settings, Listener())
    assert seeds() == [2, 2]
    path = recipes / "smith" / "common.toml"
    path.write_text(path.read_text().replace("epochs = 2", "epochs = 3"))
    assert seeds() == [0, 0]  # both are of before
    run_jobs([job for job in jobs if job.row.name == "2-mean"], settings, Listener())
    assert seeds() == [0, 0]
    summary = "| tiny | 2 of 4 | 4 | 0 | 0 | 0 | 2 |"  # the last: not compared
    assert summary in build_page(papers, load_results(papers, settings.results), recipes).splitlines()
    run_jobs(jobs, settings, Listener())
    assert seeds() == [2, 2]


def test_the_page_of_the_project_is_the_one_that_would_be_written() -> None:
    papers = find_papers(ROOT / "recipes")
    fresh = build_page(papers, load_results(papers, ROOT / "results" / "reproduction"), ROOT / "docs")
    assert (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8") == fresh, "minbert reproduce --only-page"


# --- figures --------------------------------------------------------------------------------------------------------


def test_figures_are_drawn_for_what_was_run(papers: dict[str, Paper], settings: Settings, tmp_path: Path) -> None:
    run_jobs(jobs_of(papers, "smith"), settings, Listener())
    page = tmp_path / "docs" / "page.md"
    write_page(papers, settings.results, page, draw=draw_all)
    drawn = sorted(path.name for path in (page.parent / "images" / "reproduction").iterdir())
    assert drawn == ["samplers.svg", "smith-tiny.svg"]
    caption = "*smith, tiny: score of each row; a line is from the lowest to the highest seed.*"
    assert f"(images/reproduction/smith-tiny.svg)\n\n{caption}\n" in page.read_text()
    before = (page.parent / "images" / "reproduction" / "smith-tiny.svg").read_bytes()
    write_page(papers, settings.results, page, draw=draw_all)
    assert (page.parent / "images" / "reproduction" / "smith-tiny.svg").read_bytes() == before


def test_the_papers_scores_lie_above_ours_and_those_of_older_recipes_are_marked(
    papers: dict[str, Paper], recipes: Path, settings: Settings, tmp_path: Path
) -> None:
    def draw() -> tuple[str, str]:
        """The panel of SST, and the whole picture."""
        draw_all(papers, load_results(papers, settings.results), tmp_path)
        picture = (tmp_path / "smith-tiny.svg").read_text()
        return picture.partition('<g id="axes_1">')[2].partition('<g id="axes_2">')[0], picture

    run_jobs(jobs_of(papers, "smith"), settings, Listener())
    sst, picture = draw()
    ours, theirs = (
        [one.start() for one in re.finditer(f'<use [^>]*"fill: {colour}', sst)] for colour in (OURS, THEIRS)
    )
    assert (len(ours), len(theirs)) == (3, 2)
    assert max(ours) < min(theirs), "what comes later in the file lies above"
    assert ">ours<" in picture and "older recipe" not in picture
    path = recipes / "smith" / "2-mean.toml"
    path.write_text(path.read_text().replace('pooling = "mean"', 'pooling = "max"'))
    sst, picture = draw()
    assert len(re.findall(f'<use [^>]*"fill: {OURS}', sst)) == 2
    assert len(re.findall(f'<use [^>]*"fill: #ffffff; stroke: {OURS}', sst)) == 1
    assert ">ours<" in picture and ">ours, of an older recipe or head<" in picture


def test_saving_rules_and_word_overlap_are_drawn(tmp_path: Path, settings: Settings) -> None:
    papers = find_papers(ROOT / "recipes")
    history = [
        {"step": 10 * epoch, "epoch": epoch, "scores": {"dev": {"sst": 0.3 + epoch / 10, "sts": None}}, "kept": ["model"], "seconds": 1.0}
        for epoch in (1, 2, 3)
    ]  # fmt: skip
    value = {"rows": 1, "metric": "accuracy", "metrics": {"accuracy": {"value": 0.5}}}
    bins = [{"rows": 30, "bleu": 0.1 * n, "label": 0.5 * n, "prediction": 0.999 + 0.0002 * n} for n in range(5)]
    overlap = {"sts": bins}
    content = {
        "dev": {"sst": value, "sts": value},
        "overall": {"2023": 0.5, "2024": 0.6},
        "data": {},
        "environment": {},
        "recipe": {},
        "seconds": 1.0,
        "reproduction": {"row": "", "set": [], "steps_cap": 0, "history": history, "overlap": overlap},
    }
    for row in ("7-six-epochs", "8-weighted-mean"):
        path = settings.results / "tiny" / "vinjapuri-vasireddy" / row / "seed1.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    drawn = draw_all(papers, load_results(papers, settings.results), tmp_path / "images")
    assert tmp_path / "images" / "vinjapuri-vasireddy-tiny-saving.svg" in drawn
    picture = (tmp_path / "images" / "vinjapuri-vasireddy-tiny-overlap.svg").read_text()
    assert all(f">{name}<" in picture for name in ("7-six-epochs", "8-weighted-mean", "what people said (right)"))
    assert len(re.findall(r">0\.999\d*<", picture)) > 4  # each has a scale on which such predictions are no flat line


def test_bins_of_few_pairs_are_taken_together() -> None:
    def together(*rows: int) -> list[float]:
        bins = [{"rows": n, "bleu": n / 100, "label": 2.0 * n, "prediction": 1.0} for n in rows]
        return [one["rows"] for one in enough_pairs(bins)]

    assert together(49, 195, 44, 16, 10) == [49, 195, 44, 26]
    assert together(5, 8, 49, 20) == [62, 20]
    assert together(44, 3) == [47]
    assert together(3) == [3]
    (one,) = enough_pairs({"rows": n, "bleu": n / 100, "label": 2.0 * n, "prediction": 1.0} for n in (15, 10))
    assert one == pytest.approx({"rows": 25, "bleu": 0.13, "label": 26.0, "prediction": 1.0})  # (15² + 10²) / 25 is 13


@pytest.mark.parametrize(
    ("any_improves", "weighted", "told"),
    [
        ((1, 2, 3), (1, 2, 3), "chosen by. Both saving rules kept that of every epoch"),
        (
            (1, 3),
            (1, 3),
            "chosen by. Both saving rules kept that of the same epochs (1, 3); thin: the model of that epoch",
        ),
        ((1, 2, 3), (1, 3), "chosen by, by the two saving rules; thin: the model of that epoch"),
    ],
)
def test_what_the_saving_rules_kept_is_said_as_it_is(
    any_improves: tuple[int, ...], weighted: tuple[int, ...], told: str
) -> None:
    rows = find_papers(ROOT / "recipes")["vinjapuri-vasireddy"].rows
    found = {}
    for name, kept in (("7-six-epochs", any_improves), ("8-weighted-mean", weighted)):
        history = [{"epoch": epoch, "kept": ["model"] * (epoch in kept)} for epoch in (1, 2, 3)]
        found[rows[name].key] = Found(rows[name], "tiny", {2: {"reproduction": {"history": history}}})
    assert saving_caption(found).startswith("Seed 2: ") and saving_caption(found).endswith(told)


def test_the_score_of_the_model_kept_stays_until_another_is_kept() -> None:
    scores, kept = (0.4, 0.5, 0.3, 0.6), (True, False, True, False)
    history = [
        {"epoch": epoch, "kept": ["model"] * keep, "scores": {"dev": {"sst": score}}}
        for epoch, (score, keep) in enumerate(zip(scores, kept, strict=True), start=1)
    ]
    assert kept_scores(history, "sst") == ([1, 2, 3, 4], [0.4, 0.4, 0.3, 0.3])


def test_a_picture_of_every_sampler() -> None:
    from typing import get_args, get_type_hints

    kinds = {config.kind for config in SCHEDULES.values()}
    assert kinds == set(get_args(get_type_hints(SamplerConfig)["kind"])) - {"power"}
    steps = schedule(SCHEDULES["round-robin (RR):\nSST, STS, SST, STS, QQP"])
    assert [len(epoch) for epoch in steps] == [6 + 4 + 6 + 4 + 20] * 2
    assert [list(parts) for parts in steps[0][5:7]] == [["sst"], ["sts"]]
    assert all(
        set(parts) == {"sst", "quora", "sts"} for parts in schedule(SCHEDULES["all (surgery,\nmulti-task loss)"])[0]
    )
