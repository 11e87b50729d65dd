"""Which runs are compared with which."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from minbert.errors import MinbertError
from minbert.reproduction.found import Found, load_results, verdicts
from minbert.reproduction.jobs import Settings
from minbert.reproduction.page import build_page
from minbert.reproduction.recipes import Paper, find_papers
from minbert.reproduction.runs import run_jobs
from tests.reproduction.made_up import Listener, jobs_of, written


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


@pytest.mark.parametrize(("text", "found"), [("{}", "no dev, overall"), ("[1]", "no dev"), ("{", "not JSON")])
def test_a_file_that_is_no_result_is_named(papers: dict[str, Paper], settings: Settings, text: str, found: str) -> None:
    (job,) = jobs_of(papers, "smith/1-plain")
    job.result(settings).parent.mkdir(parents=True)
    job.result(settings).write_text(text)
    with pytest.raises(MinbertError, match=rf"seed1.json: {found}.*; expected what minbert reproduce wrote"):
        load_results(papers, settings.results)


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


def test_what_changes_no_score_on_dev_is_no_condition_of_a_stage_either(papers: dict[str, Paper]) -> None:
    sets = ["training.keep=2", "stages.first.training.keep=1", "stages.first.training.epochs=3"]
    found = Found(papers["smith"].rows["1-plain"], "tiny", {1: {"reproduction": {"set": sets}}})
    assert found.sets == {("stages.first.training.epochs=3",)}
