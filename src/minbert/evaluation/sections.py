"""The parts of a report on one run, each a piece of HTML. Whatever comes from data goes through `text` or `number`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minbert.evaluation.charts import (
    Series,
    legend,
    line_chart,
    overlap_chart,
    overlap_series,
    reliability_chart,
    scatter,
    thinned,
)
from minbert.evaluation.diagnosis import Mistakes, Row, confidence_of, reliability, spread, worst_mistakes
from minbert.evaluation.overlap import by_overlap, overlap_points

SCATTER_POINTS = 1500
LONG_TEXT = 280
"""Characters of a text that are shown at once."""
RANGE = '<span class="ends" aria-hidden="true"><span>0</span><span>1</span></span>'
MISSING = '<abbr title="not defined">&ndash;</abbr>'


@dataclass(frozen=True, eq=False)
class RunData:
    """What a finished run's folder holds."""

    folder: Path
    label: str
    """What the report calls it; no two runs share it."""
    results: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    """Of metrics.jsonl."""
    predictions: Mapping[str, Sequence[Row]]
    recipe: str
    """The resolved recipe, as TOML."""

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record["kind"] == "evaluation"]

    def scores(self, split: str, task: str) -> list[tuple[float, float]]:
        """(step, score) of every evaluation that has one."""
        found = [(record["step"], record["scores"].get(split, {}).get(task)) for record in self.evaluations]
        return [(step, math.nan if value is None else value) for step, value in found] if _any(found) else []


# --- small pieces ---------------------------------------------------------------------------------------------------


def text(value: object) -> str:
    return escape(str(value))


def number(value: float | None, digits: int = 3) -> str:
    """A number to read; a dash for one that is not defined."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.{digits}f}".replace("-", "&minus;")


def interval(measured: Mapping[str, float | None]) -> str:
    low, high = measured["low"], measured["high"]
    return MISSING if low is None or high is None else f"{number(low)} to {number(high)}"


def table(caption: str, head: Sequence[str], rows: Iterable[str], *, kind: str = "") -> str:
    """A table that scrolls sideways by itself where the screen is narrow. `caption` is plain text, the rest is HTML."""
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table class="{kind}">'
        f'<caption class="unseen">{text(caption)}</caption><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def figure(title: str, picture: str, note: str = "") -> str:
    below = f'<p class="note">{note}</p>' if note else ""
    return f"<figure><figcaption>{title}</figcaption>{picture}{below}</figure>"


def passage(value: str) -> str:
    """A text of the data: a long one is cut, with the whole as tooltip and behind a click."""
    if len(value) <= LONG_TEXT:
        return f'<p class="text" dir="auto">{text(value)}</p>'
    start = f"{text(value[:LONG_TEXT].rstrip())}&hellip;"
    whole = text(value)
    return (
        f'<details class="text" dir="auto"><summary title="{whole}">{start} '
        f'<span class="more">all {len(value):,} characters</span></summary><p>{whole}</p></details>'
    )


# --- scores ---------------------------------------------------------------------------------------------------------


def scores(run: RunData) -> str:
    """Every metric of every task: dev with its interval, train, the gap; and what was tuned."""
    seen = run.results["train"]
    rows: list[str] = []
    for task, found in run.results["dev"].items():
        rows.append(f'<tr><th scope="rowgroup" colspan="6">{text(task)}</th></tr>')
        for name, measured in found["metrics"].items():
            main = name == found["metric"]
            train = seen[task]["metrics"][name]["value"] if task in seen else None
            known = train is not None and measured["value"] is not None
            rows.append(
                f'<tr class="{"main" if main else "minor"}"><td>{text(name)}</td>'
                f'<td class="n">{number(measured["value"])}</td><td class="n">{interval(measured)}</td>'
                f'<td class="drawn">{_range(measured) if main else ""}</td><td class="n">{number(train)}</td>'
                f'<td class="n">{number(train - measured["value"] if known else None)}</td></tr>'
            )
    head = ["metric", "dev", "95% interval", RANGE, "train", "gap"]
    notes = ["The interval is the bootstrap&rsquo;s over dev rows. The gap is train less dev."]
    if not seen:
        notes.append("No training rows were scored (train_sample is 0), so there is no gap.")
    return (
        table("Scores of each task", head, rows, kind="scores") + f'<p class="note">{" ".join(notes)}</p>' + tuned(run)
    )


def tuned(run: RunData) -> str:
    """Temperature and threshold, and what they bring."""
    rows = []
    for task, found in run.results["tuned_on_dev"].items():
        plain = run.results["dev"][task]
        two = len(plain["classes"]) == 2
        before, after = (each["metrics"][plain["metric"]]["value"] for each in (plain, found))
        error = (each["metrics"]["ece"]["value"] for each in (plain, found))
        rows.append(
            f'<tr><th scope="row">{text(task)}</th><td class="n">{number(found["temperature"], 2)}</td>'
            f'<td class="n">{number(found["threshold"]) if two else "no threshold"}</td>'
            f'<td class="n">{text(plain["metric"])} {number(before)} &rarr; {number(after)}</td>'
            f'<td class="n">{" &rarr; ".join(number(value) for value in error)}</td></tr>'
        )
    if not rows:
        return ""
    head = ["task", "temperature", "threshold", "score, plain &rarr; tuned", "calibration error"]
    note = "Chosen on the same dev rows, so the tuned numbers flatter; every other number here is without them."
    return "<h4>Tuned on dev</h4>" + table("Tuned decisions", head, rows) + f'<p class="note">{note}</p>'


def _range(measured: Mapping[str, float | None]) -> str:
    """Value and interval as a line from 0 to 1."""
    ends = [measured[key] for key in ("low", "high", "value")]
    if any(end is None for end in ends):
        return ""
    low, high, value = (100 * min(max(end or 0.0, 0.0), 1.0) for end in ends)
    return (
        f'<span class="range" aria-hidden="true" style="--low:{low:.1f}%;--wide:{high - low:.1f}%;'
        f'--value:{value:.1f}%"></span>'
    )


# --- curves ---------------------------------------------------------------------------------------------------------


def curves(run: RunData, task: str) -> str:
    """Two figures: the training loss, and the scores; with the scores as a table too."""
    losses = [(r["step"], r["loss"][task]) for r in run.records if r["kind"] == "train" and task in r["loss"]]
    return _loss(task, losses) + _scores_over_time(run, task)


def _loss(task: str, losses: Sequence[tuple[float, float]]) -> str:
    if not losses:
        return figure("Training loss", '<p class="empty">metrics.jsonl holds no loss of this task.</p>')
    points, size = thinned(losses)
    label = f"Training loss of {task} over {losses[-1][0]:,} steps, from {losses[0][1]:.3g} to {losses[-1][1]:.3g}"
    drawn = line_chart([Series("loss", points, 2)], label=label, x_label="step", y_label="loss", zero=True)
    means = f"A point is the mean of {size} lines of the log." if size > 1 else ""
    return figure("Training loss", drawn, means)


def _scores_over_time(run: RunData, task: str) -> str:
    metric = run.results["dev"][task]["metric"]
    series = [
        Series(split, points, style)
        for style, split in enumerate(("dev", "train"))
        if (points := run.scores(split, task))
    ]
    title = f"{text(metric)} on {' and '.join(each.name for each in series) or 'dev'}".capitalize()
    if not series:
        return figure(title, '<p class="empty">metrics.jsonl holds no evaluation of this task.</p>')
    chosen = [record["step"] for record in run.evaluations if "model" in record["kept"]]
    label = "; ".join(f"{each.name} {metric} of {task} at {len(each.points)} evaluations" for each in series)
    mark = (chosen[-1], "chosen") if chosen else None
    drawn = line_chart(series, label=label, x_label="step", y_label=metric, mark=mark)
    train = dict(run.scores("train", task))
    rows = (
        f'<tr><td class="n">{step:,.0f}{" (chosen)" if chosen and step == chosen[-1] else ""}</td>'
        f'<td class="n">{number(value)}</td><td class="n">{number(train.get(step))}</td></tr>'
        for step, value in series[0].points
    )
    values = table(f"{metric} of {task} at each evaluation", ["step", "dev", "train"], rows)
    numbers = f'<details class="numbers"><summary>As a table</summary>{values}</details>'
    return figure(title, drawn + legend(series) + numbers)


def learning_rate(run: RunData) -> str:
    rates = [(record["step"], record["lr"]) for record in run.records if record["kind"] == "train"]
    if not rates:
        return figure("Learning rate", '<p class="empty">metrics.jsonl holds no training record.</p>')
    points, _ = thinned(rates)
    label = f"Learning rate over {rates[-1][0]:,} steps, at most {max(rate for _, rate in rates):.3g}"
    drawn = line_chart([Series("learning rate", points, 3)], label=label, x_label="step", y_label="rate", zero=True)
    return figure("Learning rate of the encoder", drawn)


def _any(found: Sequence[tuple[float, float | None]]) -> bool:
    return any(value is not None for _, value in found)


# --- answers --------------------------------------------------------------------------------------------------------


def answers(run: RunData, task: str) -> str:
    """One figure: reliability of a classification's probabilities, or label against prediction of a score. A contrastive
    task has neither."""
    rows = run.predictions[task]
    if run.results["kinds"][task] == "contrastive":
        return ""
    return _reliability(run, task, rows) if "classes" in run.results["dev"][task] else _scatter(task, rows)


def _reliability(run: RunData, task: str, rows: Sequence[Row]) -> str:
    bins = reliability(rows)
    sure = sum(each.confidence * each.rows for each in bins) / len(rows)
    right = sum(each.right * each.rows for each in bins) / len(rows)
    error = run.results["dev"][task]["metrics"].get("ece", {}).get("value")
    label = f"Reliability of {task}: mean confidence {sure:.3f}, {right:.3f} right"
    verdict = (
        "too sure" if sure - right > 0.02 else "not sure enough" if right - sure > 0.02 else "about as sure as right"
    )
    note = (
        f"Mean confidence {number(sure)}, {number(right)} right: {verdict}. Calibration error {number(error)}. "
        "On the diagonal, confidence is right; whiskers are 95% intervals; a bigger dot is more rows."
    )
    return figure("Reliability", reliability_chart(bins, label=label), note)


def _scatter(task: str, rows: Sequence[Row]) -> str:
    pairs = np.array([(row["label"], row["prediction"]) for row in rows], dtype=np.float64)  # (rows, 2)
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if not len(pairs):
        return figure("Label and prediction", '<p class="empty">No row has a number for both.</p>')
    drawn = pairs[spread(len(pairs), SCATTER_POINTS)]
    label = f"Prediction against label for {len(drawn):,} rows of {task}"
    note = "On the diagonal, the prediction is the label."
    if len(drawn) < len(pairs):
        note += f" {len(drawn):,} of {len(pairs):,} rows are drawn, evenly through the file."
    return figure("Label and prediction", scatter(drawn[:, 0], drawn[:, 1], label=label), note)


def word_overlap(run: RunData, task: str) -> str:
    """One figure, for pairs: the prediction against the words that both texts share."""
    rows = run.predictions[task]
    if not rows or "text2" not in rows[0]:
        return ""
    title = "Similarity against word overlap"
    points = overlap_points(rows)
    if not len(points):
        return figure(title, '<p class="empty">No row has a number for both.</p>')
    bins = by_overlap(points)
    classes = run.results["dev"][task].get("classes", [])
    y_label = f"probability of {classes[1]}" if len(classes) == 2 else "prediction"
    shown = points[spread(len(points), SCATTER_POINTS)]
    drawn = overlap_chart(
        shown, bins, label=f"Prediction of {task} against BLEU, {len(shown):,} pairs", y_label=y_label
    )
    note = (
        "Where the mean prediction rises above the mean label, the model takes shared words for shared meaning. "
        f"Correlation with the overlap: labels {number(_correlation(points[:, 0], points[:, 1]), 2)}, "
        f"predictions {number(_correlation(points[:, 0], points[:, 2]), 2)}."
    )
    if len(shown) < len(points):
        note += f" Drawn are {len(shown):,} of {len(points):,} pairs; the means are of all."
    return figure(title, drawn + legend(overlap_series(bins)), note)


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float | None:
    return float(np.corrcoef(one, other)[0, 1]) if len(one) > 1 and one.std() and other.std() else None


def confusion(task: str, found: Mapping[str, Any]) -> str:
    """Labels down, answers across; each cell's colour is its share of the row."""
    classes, counts = found["classes"], found["confusion"]
    rows = []
    for place, (name, row) in enumerate(zip(classes, counts, strict=True)):
        total = sum(row)
        cells = []
        for answer, count in enumerate(row):
            share = count / total if total else 0.0
            kind = "right" if answer == place else "wrong"
            cells.append(
                f'<td class="{kind}" style="--share:{100 * share:.0f}%">{count:,}<small>{share:.0%}</small></td>'
            )
        accuracy = (
            f'<td class="n total">{number(found["class_accuracy"][place])}</td><td class="n total">{total:,}</td>'
        )
        rows.append(f'<tr><th scope="row">{text(name)}</th>{"".join(cells)}{accuracy}</tr>')
    head = ["label \\ answer", *(text(name) for name in classes), "class accuracy", "rows"]
    kind = "confusion many" if len(classes) > 8 else "confusion"
    return table(f"Confusion matrix of {task}: labels down, answers across", head, rows, kind=kind)


def mistakes(run: RunData, task: str) -> str:
    """The worst rows, by a rule that is said."""
    if run.results["kinds"][task] == "contrastive":
        return _missed(run.predictions[task])
    classes = run.results["dev"][task].get("classes", [])
    groups = worst_mistakes(run.predictions[task], classes)
    blocks = "".join(_group(group, lambda row: _verdict(row, classes)) for group in groups)
    return f'<p class="note">{text(groups[0].rule)} At most 10 each.</p><div class="groups">{blocks}</div>'


def _missed(rows: Sequence[Row], count: int = 10) -> str:
    """Rows of a contrastive task whose partner was not found."""
    missed = [row for row in rows if row["prediction"] == 0]
    rule = "Rows whose second text is not the nearest of all second texts of dev, in the order of the file."
    group = Mistakes("Another row\u2019s second text was nearer", rule, missed[:count], len(missed))
    block = _group(group, lambda _: '<b class="said">not the nearest</b>')
    return f'<p class="note">{rule} At most {count}.</p><div class="groups">{block}</div>'


def _group(group: Mistakes, verdict: Callable[[Row], str]) -> str:
    items = "".join(
        f'<li><p class="verdict">{verdict(row)} <span class="id">{text(row["id"])}</span></p>'
        f"{passage(row['text'])}{passage(row['text2']) if 'text2' in row else ''}</li>"
        for row in group.rows
    )
    listed = f'<ol class="mistakes">{items}</ol>' if items else '<p class="empty">None.</p>'
    shown = f"{len(group.rows)} of {group.found:,}" if group.found > len(group.rows) else f"{group.found}"
    return f'<section><h5>{text(group.title)} <span class="count">{shown}</span></h5>{listed}</section>'


def _verdict(row: Row, classes: Sequence[str]) -> str:
    if not classes:
        return (
            f'<b class="said">predicted {number(row["prediction"], 2)}</b> <span>label {number(row["label"], 2)}</span> '
            f"<span>off by {number(abs(row['prediction'] - row['label']), 2)}</span>"
        )
    said, meant = (text(classes[int(row[key])]) for key in ("prediction", "label"))
    return f'<b class="said">{said} {confidence_of(row):.1%}</b> <span>label {meant}</span>'


# --- vectors --------------------------------------------------------------------------------------------------------


def geometry(run: RunData) -> str:
    """Alignment and uniformity of the tasks that compare texts."""
    rows = [
        f'<tr><th scope="row">{text(task)}</th><td class="n">{number(found["alignment"])}</td>'
        f'<td class="n">{number(found["uniformity"])}</td><td class="n">{found["positives"]:,}</td>'
        f'<td class="n">{found["texts"]:,}</td><td>{text(found["vectors"])}</td></tr>'
        for task, found in run.results["geometry"].items()
    ]
    head = ["task", "alignment", "uniformity", "pairs that mean the same", "texts", "vectors of"]
    note = (
        "Alignment is the mean squared distance of texts that mean the same (of a score, the upper fifth of its scale), "
        "uniformity the log of the mean of exp(&minus;2 d&sup2;) over all pairs of texts, both on the unit sphere; of each, "
        "less is better (Wang &amp; Isola 2020). On a sample of dev, each text read by itself. A text that is its own "
        "partner has an alignment of 0."
    )
    return table("Alignment and uniformity", head, rows) + f'<p class="note">{note}</p>'


# --- data -----------------------------------------------------------------------------------------------------------


def data_notes(run: RunData) -> str:
    """What was read, skipped and cut, and the steps."""
    rows = []
    for split, tasks in run.results["data"].items():
        for task, note in tasks.items():
            skipped = ", ".join(f"{count:,} {text(reason)}" for reason, count in note["skipped"].items()) or "none"
            added = ", ".join(f"{count:,} {text(what)}" for what, count in note.get("added", {}).items())
            cut = note["truncated"]
            lost = f"{cut['texts']:,} ({cut['tokens']:,} tokens)" if cut["texts"] else "none"
            files = "<br>".join(text(name) for name in note["files"])
            rows.append(
                f'<tr><th scope="row">{text(task)}</th><td>{text(split)}</td><td class="n">{note["rows"]:,}{f"<small>{added}</small>" if added else ""}</td>'
                f'<td>{skipped}</td><td>{lost}</td><td class="files">{files}</td></tr>'
            )
    done, planned = run.results["steps"], run.results["planned_steps"]
    stopped = " It stopped early." if done < planned else ""
    steps = f"{done:,} of {planned:,} planned steps, over {run.results['rows']:,} rows.{stopped}"
    head = ["task", "split", "rows", "skipped", "texts cut", "files"]
    return table("Data of each task", head, rows) + f'<p class="note">{steps}</p>'
