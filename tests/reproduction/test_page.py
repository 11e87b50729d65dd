"""What docs/reproduction.md says of the runs that are there."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from minbert.reproduction.found import load_results
from minbert.reproduction.jobs import Settings
from minbert.reproduction.page import build_page
from minbert.reproduction.recipes import Paper, find_papers
from minbert.reproduction.runs import run_jobs
from tests.reproduction.made_up import ROOT, Listener, jobs_of, written


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


def test_the_page_of_the_project_is_the_one_that_would_be_written() -> None:
    papers = find_papers(ROOT / "recipes")
    fresh = build_page(papers, load_results(papers, ROOT / "results" / "reproduction"), ROOT / "docs")
    assert (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8") == fresh, "minbert reproduce --only-page"
