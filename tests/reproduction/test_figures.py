"""The figures of docs/reproduction.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from minbert.config import SamplerConfig
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
from minbert.reproduction.found import Found, load_results
from minbert.reproduction.jobs import Settings
from minbert.reproduction.page import write_page
from minbert.reproduction.recipes import Paper, find_papers
from minbert.reproduction.runs import run_jobs
from tests.reproduction.made_up import ROOT, Listener, jobs_of


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
        "environment": {"device_name": "abacus", "commit": None},
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
