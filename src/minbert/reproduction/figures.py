"""The figures of docs/reproduction.md as SVG: schedules of the samplers, score of each row, score against epoch,
similarity against word overlap.

draw_all(papers, results, Path("docs/images/reproduction"))
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minbert.config import SamplerConfig
from minbert.data.samplers import make_sampler
from minbert.errors import require
from minbert.reproduction.found import Found, Results, tasks_of
from minbert.reproduction.recipes import LABELS, MEAN, Paper

COLOURS = {"sst": "#c9a227", "quora": "#1b6ca8", "sts": "#b5473c"}
OURS, THEIRS = "#1b6ca8", "#8a8a8a"
SIZES = {"sst": 6, "quora": 20, "sts": 4}  # batches of the made-up datasets
BATCH = 8
SCHEDULES: dict[str, SamplerConfig] = {
    "sequential (ST)": SamplerConfig("sequential", order=("quora", "sst", "sts")),
    "round-robin (RR):\nSST, STS, SST, STS, QQP": SamplerConfig(
        "round-robin", order=("sst", "sts", "sst", "sts", "quora")
    ),
    "round-robin by batch": SamplerConfig("round-robin", unit="batch"),
    "proportional": SamplerConfig("proportional"),
    "uniform (MT-DNN,\nequal weight)": SamplerConfig("uniform"),
    "weighted (MT-DNN,\n2x QQP)": SamplerConfig("weighted", weights={"quora": 2.0}),
    "annealed": SamplerConfig("annealed"),
    "all (surgery,\nmulti-task loss)": SamplerConfig("all"),
    "mixed": SamplerConfig("mixed"),
}
SAVING = ("vinjapuri-vasireddy/7-six-epochs", "vinjapuri-vasireddy/8-weighted-mean")
"""Two rows that differ only in when a model is kept."""
OVERLAP = "vinjapuri-vasireddy"
"""The paper that looks at word overlap."""
OVERLAP_CAPTION = (
    "Seed 1: mean predicted similarity of STS pairs against the words they share, a panel for each row with a scale of its "
    "own; dashed: what people said. Tenths of BLEU's range with fewer than 20 pairs are taken together"
)
History = Sequence[Mapping[str, Any]]
"""The evaluations of a run: epoch, scores, what was kept."""


def draw_all(papers: Mapping[str, Paper], results: Results, images: Path) -> list[Path]:
    """Every figure that there are results for; a figure whose results are gone is removed."""
    matplotlib: Any = require("matplotlib", "report", "drawing the figures of minbert reproduce")
    matplotlib.use("svg")
    from matplotlib import pyplot

    figures: dict[str, tuple[tuple[float, float], Callable[[Any], None]]] = {"samplers": ((9, 5.2), _schedules)}
    for encoder, found in results.items():
        for paper in papers.values():
            rows = {row.name: found[row.key] for row in paper.rows.values() if row.key in found}
            if len(rows) > 1:
                figures[f"{paper.name}-{encoder}"] = (9, 3.0 + 0.12 * len(rows)), _scores(paper, rows)
        if pair := _saving_pair(found):
            paper_name = SAVING[0].partition("/")[0]
            figures[f"{paper_name}-{encoder}-saving"] = (9, 3.0), _saving(pair[1])
        curves = {one.row.name: _overlap_of(one) for one in found.values() if one.row.paper == OVERLAP}
        if curves := {name: bins for name, bins in curves.items() if bins}:
            lines, columns = math.ceil(len(curves) / 4), min(4, len(curves))
            size = (1.0 + 2.0 * columns, 0.9 + 1.7 * lines)
            figures[f"{OVERLAP}-{encoder}-overlap"] = size, _overlap(curves, lines, columns)
    images.mkdir(parents=True, exist_ok=True)
    for old in images.glob("*.svg"):
        if old.stem in figures or any(old.stem.startswith(f"{name}-") for name in papers):
            old.unlink()
    drawn = []
    # The same results give the same bytes, and letters stay letters
    settings = {"svg.hashsalt": "minbert", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        for name, (size, draw) in figures.items():
            figure = pyplot.figure(figsize=size, layout="constrained", facecolor="white")
            draw(figure)
            for axes in figure.axes:
                axes.spines[["top", "right"]].set_visible(False)
                axes.set_axisbelow(True)
            figure.savefig(images / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
            drawn.append(images / f"{name}.svg")
    return drawn


def schedule(config: SamplerConfig, *, epochs: int = 2, seed: int = 1) -> list[list[dict[str, int]]]:
    """The rows of each task in every step, epoch by epoch, over the made-up datasets."""
    lengths = {task: np.full(batches * BATCH, 10) for task, batches in SIZES.items()}
    sampler = make_sampler(config, lengths, epochs=epochs, batch_size=BATCH, seed=seed)
    return [[{part.task: len(part.rows) for part in step} for step in epoch] for epoch in sampler.epochs()]


def _schedules(figure: Any) -> None:
    axes = figure.add_subplot()
    longest = 0
    for place, config in enumerate(SCHEDULES.values()):
        bars: dict[tuple[str, float, float], list[tuple[int, int]]] = {}  # a task's, by height: start and length
        step, ends = 0, []
        for epoch in schedule(config):
            for parts in epoch:
                bottom, total = place - 0.38, sum(parts.values())
                for task, rows in parts.items():
                    height = 0.76 * rows / total
                    spots = bars.setdefault((task, round(bottom, 3), round(height, 3)), [])
                    begun = spots.pop() if spots and sum(spots[-1]) == step else (step, 0)
                    spots.append((begun[0], begun[1] + 1))
                    bottom += height
                step += 1
            ends.append(step)
        for (task, bottom, height), spots in bars.items():
            axes.broken_barh(spots, (bottom, height), color=COLOURS[task], linewidth=0)
        axes.vlines(ends, place - 0.46, place + 0.46, color="black", linewidth=1)
        longest = max(longest, step)
    axes.set_yticks(range(len(SCHEDULES)), list(SCHEDULES))
    axes.set_ylim(len(SCHEDULES) - 0.4, -0.6)
    axes.set_xlim(0, longest + 1)
    axes.set_xlabel("step; a black line is the end of an epoch, where the model is scored")
    patches = [axes.bar(0, 0, color=colour, label=LABELS[task]) for task, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=3, frameon=False)


def _scores(paper: Paper, rows: Mapping[str, Found]) -> Callable[[Any], None]:
    """A panel for each task: the paper's score and ours, row by row."""
    tasks = tasks_of(paper, rows)

    def draw(figure: Any) -> None:
        panels = [task for task in tasks if sum(bool(one.values(task)) for one in rows.values()) > 1]
        names = list(rows)
        shared: Any = None
        for place, task in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), place + 1, sharey=shared)
            shared = shared or axes
            for spot, one in enumerate(rows.values()):
                theirs = one.row.reported.overall.get("dev") if task == MEAN else one.row.reported.dev.get(task)
                ours = one.values(task)
                if task == MEAN and len(next(iter(one.scores.values()))) < 3:
                    ours = []  # the mean of one task is that task
                if theirs is not None:  # above ours, so that both are seen where they are the same
                    edge = {"markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 3}
                    axes.plot(theirs, spot, "D", color=THEIRS, markersize=5, label="paper", **edge)
                if ours:
                    label, inside = ("ours", OURS) if one.is_current else ("ours, of an older recipe or head", "white")
                    axes.plot([min(ours), max(ours)], [spot, spot], color=OURS, linewidth=1)
                    middle = statistics.fmean(ours)
                    axes.plot(middle, spot, "o", color=OURS, markerfacecolor=inside, markersize=7, label=label)
            axes.tick_params(axis="y", labelleft=place == 0)
            axes.grid(axis="both", color="#e5e5e5", linewidth=0.6)
            axes.set_title(LABELS[task], fontsize=9)
        if shared is not None:
            shared.set_yticks(range(len(names)), names)
            shared.set_ylim(len(names) - 0.5, -0.5)
        handles = {
            label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=3, frameon=False)

    return draw


def _saving_pair(found: Mapping[str, Found]) -> tuple[int, list[History]] | None:
    """The first seed that both rows have, and what each evaluated and kept with it."""
    one, other = (found[key].by_seed if key in found else {} for key in SAVING)
    seed = min(one.keys() & other.keys(), default=None)
    return None if seed is None else (seed, [rows[seed]["reproduction"]["history"] for rows in (one, other)])


def saving_caption(found: Mapping[str, Found]) -> str:
    """What the lines are; where the two rules kept the same, that is all there is to see."""
    pair = _saving_pair(found)
    if pair is None:
        return ""
    seed, histories = pair
    first, second = (kept_epochs(history) for history in histories)
    is_every = len(first) == len(histories[0])
    lines = ", by the two saving rules"
    if first == second:
        epochs = "every epoch" if is_every else f"the same epochs ({', '.join(map(str, first))})"
        lines = f". Both saving rules kept that of {epochs}"
    text = (
        f"Seed {seed}: score of the model kept so far, after each epoch and on the dev rows that models are chosen by"
    )
    return f"{text}{lines}" + ("" if first == second and is_every else "; thin: the model of that epoch")


def _saving(histories: list[History]) -> Callable[[Any], None]:
    """Score against epoch: of each epoch's model, and of the one kept by each rule."""
    names = ("any task improves", "weighted mean")

    def draw(figure: Any) -> None:
        tasks = list(histories[0][0]["scores"]["dev"])
        for place, task in enumerate(tasks):
            axes = figure.add_subplot(1, len(tasks), place + 1)
            for history, name, colour, style in zip(histories, names, (OURS, "#b5473c"), ("-", "--"), strict=True):
                axes.plot(
                    [one["epoch"] for one in history],
                    [one["scores"]["dev"][task] or 0.0 for one in history],
                    color=colour,
                    linewidth=0.6,
                    alpha=0.6,
                )
                axes.plot(*kept_scores(history, task), style, color=colour, marker="o", markersize=3.5, label=name)
            axes.set_xlabel("epoch")
            axes.set_title(LABELS[task], fontsize=9)
            axes.grid(axis="both", color="#e5e5e5", linewidth=0.6)
        figure.axes[0].set_ylabel("dev score of the model kept")
        figure.axes[0].legend(frameon=False, fontsize=8)

    return draw


def _overlap_of(one: Found) -> list[dict[str, float]]:
    """STS pairs by the words they share, for a row's first seed; empty where that was not kept."""
    found = next(iter(one.by_seed.values()))["reproduction"].get("overlap", {})
    return enough_pairs(found.get("sts", []))


def enough_pairs(bins: Iterable[dict[str, float]], least: int = 20) -> list[dict[str, float]]:
    """Bins of fewer pairs together with the next, and at the end with the one before: a mean of ten says little."""
    merged: list[dict[str, float]] = []
    for one in bins:
        if merged and merged[-1]["rows"] < least:
            merged[-1] = _together(merged[-1], one)
        else:
            merged.append(one)
    if len(merged) > 1 and merged[-1]["rows"] < least:
        merged[-2:] = [_together(*merged[-2:])]
    return merged


def _together(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    rows = one["rows"] + other["rows"]
    means = ("bleu", "label", "prediction")
    return {"rows": rows} | {name: (one[name] * one["rows"] + other[name] * other["rows"]) / rows for name in means}


def _overlap(curves: Mapping[str, Sequence[Mapping[str, float]]], lines: int, columns: int) -> Callable[[Any], None]:
    """A panel for each row, on the scale of its own predictions: where those are nearly the same whatever the pair, one
    scale for all would hide whether they rise with BLEU. Dashed, the same in every panel: what people said."""

    def draw(figure: Any) -> None:
        for place, (name, bins) in enumerate(curves.items()):
            axes = figure.add_subplot(lines, columns, place + 1)
            people = axes.twinx()
            overlap = [one["bleu"] for one in bins]
            people.plot(overlap, [one["label"] for one in bins], "--", color="black", linewidth=1.2)
            axes.plot(overlap, [one["prediction"] for one in bins], "o-", color=OURS, linewidth=1.2, markersize=3)
            for part in (axes, people):
                part.ticklabel_format(useOffset=False)
                part.locator_params(nbins=4)
            ends_line = place + 1 == len(curves) or (place + 1) % columns == 0
            people.tick_params(axis="y", right=ends_line, labelright=ends_line)
            axes.grid(axis="both", color="#e5e5e5", linewidth=0.6)
            axes.set_title(name, fontsize=9)
        figure.supxlabel("word overlap of the two sentences (BLEU)", fontsize=9)
        handles = [axes.lines[0], people.lines[0]]
        texts = ["mean prediction (left, its own scale)", "what people said (right)"]
        figure.legend(handles, texts, loc="outside upper center", ncols=min(2, columns), frameon=False)

    return draw


def kept_epochs(history: History) -> list[int]:
    """After which epochs the model was kept; the first one always is."""
    return [one["epoch"] for place, one in enumerate(history) if not place or "model" in one["kept"]]


def kept_scores(history: History, task: str) -> tuple[list[int], list[float]]:
    """After each evaluation, the score of the model that was kept last."""
    scores: list[float] = []
    for one in history:
        kept = "model" in one["kept"] or not scores
        scores.append(one["scores"]["dev"][task] or 0.0 if kept else scores[-1])
    return [one["epoch"] for one in history], scores
