"""docs/reproduction.md: the papers' tables with their numbers and ours, and which of their findings held.

    write_page(find_papers(Path("recipes")), Path("results/reproduction"), Path("docs/reproduction.md"))

Everything on the page comes from the recipes and from results/; what has not been run is said to be so.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minbert.atomic import write_text
from minbert.config import Recipe
from minbert.encoders import has_seen_quora
from minbert.recipes import read_recipe
from minbert.reproduction.comparisons import findings_table, interval
from minbert.reproduction.figures import OVERLAP_CAPTION, saving_caption
from minbert.reproduction.findings import DID_NOT_HOLD, HELD, MARGIN, NOT_COMPARED, UNDECIDED
from minbert.reproduction.found import (
    ALMOST_ALWAYS,
    UNEVEN,
    Found,
    Results,
    gains,
    load_results,
    tasks_of,
    verdicts,
)
from minbert.reproduction.recipes import LABELS, MEAN, Paper, Row
from minbert.tasks import CONTRASTIVE

INTRO = """\
# The papers' rows, their numbers and ours

Written by `minbert reproduce`; do not edit. Each row of the papers' tables is a recipe in [recipes/]({recipes}).
Their numbers are as printed, an empty cell is a number that the paper does not print. Ours are scores on dev, the mean over
seeds and ± the standard deviation.

What differs from the papers, in every row:

- **The encoder.** They started from bert-base-uncased (12 layers, 110 million parameters). Ours is named above each table.{encoders}
{quora}- **The small print.** Where a paper is silent the recipe follows the course's own code (AdamW without weight decay, no
  warm-up, no clipping, batches of 8, dropout .3); each guess is in the notes below its table. AdamW's eps is 1e-8, the course's 1e-6.
  Batches hold texts of about one length, but for mixed ones. On a GPU products are in bf16.

A finding compares two rows over the seeds that both have: the mean of the paired differences and its 95% t interval. "Better"
**held** if the interval lies above 0 and **did not hold** if it lies below; "no better" held if the interval ends below
+{margin:g}, and did not hold if it lies above 0. Everything else is **undecided**, and so is every finding with one seed. A finding is
**not compared** where one of its rows was not run or the two have no seed in common, where not all of their runs had the same
encoder, or the same settings or caps of several sizes shortened them, and where one of the two was not made by its recipe as it is now.
Nor are two rows of which a cap on the steps left different parts, one more than {uneven:g} times the other, nor is a claim about what a
pretrained pooler has learnt, with an encoder that has none, nor a row of ensembles of which two seeds share a training: the
figures are shown all the same. A
correlation that does not exist, because all answers are the same, counts as 0. Of twenty findings that are nothing but chance,
one would be decided all the same. Where two rows differ in more than what the finding is about, as the papers' own rows do,
the list of what differs says so.

After each epoch a model is chosen or not by its scores on at most 4,000 dev rows of a task (Quora has 20,212; `dev_sample` in the
recipes). The scores in the tables are those of the chosen model on all of dev.
"""

OUR_ENCODERS = """
  minilm has 6 layers and 22 million parameters, mpnet 12 and 109 million. Both were trained to give sentence vectors, and
  **both have seen Quora questions** in that training, so that a Quora score of theirs is not one of a fresh model. BERT's
  pooler was pretrained, **theirs never was**: the bias is 0 and the weights are noise. Rows that read the pooler train it from
  there."""
OUR_QUORA = 127_043
"""Rows of the file that its paragraph is about."""
QUORA = f"""\
- **The training data of Quora.** The course's 141,506 pairs are not to be had; the {OUR_QUORA:,} here are another sample, with 60%
  duplicates where dev has 37%. The recipes do as the papers did and weigh nothing;
  `--set tasks.quora.class_weights=[1.6,0.6]` corrects for it, and a table made so says it.
"""

OVERALL = {
    "2023": "the mean of the three scores",
    "2024": "the mean of the three scores, of which the correlation r counts as (r + 1) / 2",
}


OVER_BASE = (
    "Over that row: the mean difference over the seeds that both have, no verdict. Empty: that row was not run here, the two "
    "had other settings or caps, or one of them was made before its recipe or a head was last changed."
)


def write_page(
    papers: Mapping[str, Paper], results: Path, page: Path, *, draw: Callable[..., list[Path]] | None = None
) -> None:
    """The page and, if `draw` is given, its figures, in images/reproduction beside it."""
    found = load_results(papers, results)
    images = page.parent / "images" / "reproduction"
    if draw is not None:
        draw(papers, found, images)
    write_text(page, build_page(papers, found, page.parent))


def build_page(papers: Mapping[str, Paper], results: Results, folder: Path) -> str:
    """The whole page; `folder` is where it will lie."""
    (recipes,) = {row.recipes for paper in papers.values() for row in paper.rows.values()}
    every = [one for found in results.values() for row in found.values() for one in row.by_seed.values()]
    intro = INTRO.format(
        recipes=_relative(recipes / "README.md", folder),
        margin=MARGIN,
        uneven=UNEVEN,
        encoders=OUR_ENCODERS if {"minilm", "mpnet"} & results.keys() else "",
        quora=QUORA if any(_train_rows(one, "quora") == OUR_QUORA for one in every) else "",
    )
    parts = [intro, _summary(papers, results), _decided(papers, results)]
    parts.append(_picture(folder, "samplers", SCHEDULES))
    parts += [_section(paper, results, folder) for paper in papers.values()]
    return "\n".join(part for part in parts if part)


def _train_rows(results: Mapping[str, Any], task: str) -> int | None:
    return results["data"].get("train", {}).get(task, {}).get("rows")


SCHEDULES = "Two epochs of each sampler over three made-up datasets of 6, 20 and 4 batches: which task each step has"


def _summary(papers: Mapping[str, Paper], results: Results) -> str:
    """How many rows were run and how many findings held, an encoder a line."""
    total = sum(len(paper.rows) for paper in papers.values())
    if not results:
        return f"**Nothing has been run yet**: {total} rows wait for `minbert reproduce --encoder minilm --data DIR`.\n"
    lines = [
        "| encoder | rows run | runs | findings that held | did not hold | undecided | not compared |",
        "|---|---|---|---|---|---|---|",
    ]
    for encoder, found in results.items():
        judged = [verdict for paper in papers.values() for verdict in verdicts(paper, found)]
        words = Counter(verdict.word for verdict in judged)
        runs = sum(len(row.by_seed) for row in found.values())
        counts = " | ".join(str(words[word]) for word in (HELD, DID_NOT_HOLD, UNDECIDED, NOT_COMPARED))
        lines.append(f"| {encoder} | {len(found)} of {total} | {runs} | {counts} |")
    return "\n".join([*lines, ""])


def _decided(papers: Mapping[str, Paper], results: Results) -> str:
    """The findings that the runs decide, in two lists an encoder."""
    lines = []
    for encoder, found in results.items():
        judged = [(paper, verdict) for paper in papers.values() for verdict in verdicts(paper, found)]
        for word in (HELD, DID_NOT_HOLD):
            those = [(paper, verdict) for paper, verdict in judged if verdict.word == word]
            lines += [f"With {encoder} {word}:", ""] if those else []
            for paper, verdict in those:
                ours = ", ".join(interval(difference, several=True) for difference in verdict.differences)
                lines.append(f"- {verdict.finding.claim} `{paper.name}`: {ours}")
            lines += [""] if those else []
    return "\n".join(lines)


def _section(paper: Paper, results: Results, folder: Path) -> str:
    parts = [f"## {paper.claims.title if paper.claims.best else 'Beyond the papers'}", ""]
    mine = {encoder: _of(paper, found) for encoder, found in results.items()}
    mine = {encoder: found for encoder, found in mine.items() if found}
    if not mine:
        parts += ["**Not run yet.**", "", *_table(paper, {}, folder, bases={}), ""]
        parts += [*findings_table(paper, {}), ""] if paper.claims.findings else []
    for place, (encoder, found) in enumerate(mine.items()):
        parts += [f"### {paper.name} with {encoder}", "", *_conditions(encoder, found), *_rule(paper), ""]
        parts += [*_table(paper, found, folder, bases=results[encoder], every=place == 0), "", *_one_answer(found)]
        missing = [row for row in paper.rows.values() if row.key not in found]
        if missing and place == 0:  # with further encoders only some rows are run
            parts += ["Not run: " + ", ".join(f"`{row.name}`" for row in missing) + ".", ""]
        parts.append(
            _picture(
                folder,
                f"{paper.name}-{encoder}",
                f"{paper.name}, {encoder}: score of each row; a line is from the lowest to the highest seed",
            )
        )
        parts.append(_picture(folder, f"{paper.name}-{encoder}-saving", saving_caption(found)))
        parts.append(_picture(folder, f"{paper.name}-{encoder}-overlap", OVERLAP_CAPTION))
        parts += _geometry(found, results[encoder])
        if any(verdict.seeds for verdict in verdicts(paper, found)):
            parts += [*findings_table(paper, found), ""]
    notes = [f"- {note}" for note in paper.claims.notes]
    notes += [f"- {_link(row, folder)}: {row.reported.note}" for row in paper.rows.values() if row.reported.note]
    if notes:
        parts += ["<details><summary>Notes: deviations, misprints, guesses</summary>", "", *notes, "", "</details>", ""]
    return "\n".join(part for part in parts if part is not None)


def _of(paper: Paper, found: Mapping[str, Found]) -> dict[str, Found]:
    return {row.key: found[row.key] for row in paper.rows.values() if row.key in found}


def _conditions(encoder: str, found: Mapping[str, Found]) -> list[str]:
    """Under which conditions, on which data and machine the rows were run."""
    caps = {cap for row in found.values() for cap in row.caps}
    settings = {setting for row in found.values() for setting in row.settings}
    idle = {setting for setting in settings if not any(row.is_changed_by(setting) for row in found.values())}
    named = Counter(condition for row in found.values() for condition in row.conditions(caps, idle))
    lines = []
    if len(named) == 1:
        lines.append(f"All of them: {next(iter(named))}.")
    else:
        for condition in named:
            rows = ", ".join(f"`{one.row.name}`" for one in found.values() if condition in one.conditions(caps, idle))
            lines.append(f"- {condition}: {rows}")
    if caps:
        lines.append("A longer run was thinned evenly to the cap, so that each epoch and each task keeps its share.")
    if has_seen_quora(encoder):
        lines.append(f"{encoder} has seen Quora questions in its own training.")
    every = [one for row in found.values() for one in row.by_seed.values()]
    devices = sorted({str(one["environment"]["device_name"]) for one in every})
    commits = sorted({one["environment"]["commit"] for one in every if one["environment"]["commit"]})
    hours = sum(one["seconds"] for one in every) / 3600
    lines.append(
        f"{len(every)} run{'s' * (len(every) > 1)}, {hours:.1f} hours of training on {', '.join(devices)}"
        + (f"; commit{'s' * (len(commits) > 1)} {', '.join(commits)}." if commits else ".")
    )
    sizes: dict[str, set[int]] = {}
    for one in every:
        for task, note in one["data"].get("train", {}).items():
            sizes.setdefault(task, set()).add(note["rows"])
    if sizes:
        told = (f"{LABELS.get(task, task)} {' or '.join(f'{n:,}' for n in sorted(sizes[task]))}" for task in sizes)
        lines.append(f"Training rows, by row: {', '.join(told)}.")
    old = [f"`{one.row.name}`" for one in found.values() if not one.is_current]
    if old:
        lines.append(f"Made before the recipe, or a head that it names, was last changed: {', '.join(old)}.")
    lines += [f"`{one.row.name}`, {told}." for one in found.values() for told in one.other_members]
    return lines


def _rule(paper: Paper) -> list[str]:
    """What "overall" means in the paper's table."""
    rules = sorted({row.reported.rule for row in paper.rows.values()})
    return [f"Overall: {'; or '.join(OVERALL[rule] for rule in rules)}."]


def _table(
    paper: Paper, found: Mapping[str, Found], folder: Path, *, bases: Mapping[str, Found], every: bool = True
) -> list[str]:
    """The rows, theirs beside ours; those of no paper, which nothing else compares, beside the ones they were built on."""
    tasks = tasks_of(paper, found)
    printed = any(row.reported.dev or row.reported.overall for row in paper.rows.values())
    beside = not paper.claims.findings and any(row.reported.after for row in paper.rows.values())
    heads = ["row", "built on"] if beside else ["row"]
    heads += [f"{LABELS[task]}, theirs | ours" if printed else LABELS[task] for task in tasks]
    head = f"| {' | '.join([*heads, *['overall, over that row'] * beside, 'seeds', 'steps'])} |"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in paper.rows.values():
        ours = found.get(row.key)
        if ours is None and not every:
            continue
        best = "**" if row.name == paper.claims.best else ""
        cells = [f"{best}{_link(row, folder)}{best}", *[_base(row, folder)] * beside]
        for task in tasks:
            reported = row.reported.overall.get("dev") if task == MEAN else row.reported.dev.get(task)
            shown_here = ours is not None and (task != MEAN or len(next(iter(ours.scores.values()))) > 2)
            cells += [_printed(reported)] * printed
            cells.append(_spread(ours.values(task)) if ours is not None and shown_here else "")
        above = gains(ours, bases.get(row.reported.after)) if ours and beside else []
        cells += [f"{statistics.fmean(above):+.3f}" if above else ""] * beside
        lines.append("| " + " | ".join([*cells, str(len(ours.by_seed)) if ours else "", _steps(ours)]) + " |")
    if beside:
        lines += ["", OVER_BASE]
    tested = [row for row in paper.rows.values() if row.reported.test or "test" in row.reported.overall]
    for row in tested:
        scores = {**row.reported.test, MEAN: row.reported.overall.get("test")}
        told = ", ".join(f"{LABELS[task]} {_printed(value)}" for task, value in scores.items() if value is not None)
        lines += [
            "",
            f"Their test scores of {_link(row, folder)}: {told}. The test labels are not public; ours are dev only.",
        ]
    return lines


def _one_answer(found: Mapping[str, Found]) -> list[str]:
    """Which rows have the same answer to nearly everything, a line for each task: their scores say how common it is."""
    lines = []
    for task, label in LABELS.items():
        counts = [(one, one.one_answer(task)) for one in found.values()]
        rows = [f"`{one.row.name}` ({count} of {len(one.by_seed)} seeds)" for one, count in counts if count]
        always = f"Answers one class of {label} almost always ({ALMOST_ALWAYS:.1%} of dev or more)"
        lines += [f"{always}: {', '.join(rows)}.", ""] if rows else []
    return lines


def _steps(found: Found | None) -> str:
    if found is None:
        return ""
    one = next(iter(found.by_seed.values()))
    planned, whole = one.get("planned_steps"), one.get("whole_steps")
    if planned is None:
        return ""
    before = "".join(f"{stage['steps']:,} + " for stage in one.get("stages", {}).values())
    return before + (f"{planned:,}" if whole in (None, planned) else f"{planned:,} of {whole:,}")


def _geometry(found: Mapping[str, Found], every: Mapping[str, Found]) -> list[str]:
    """Alignment and uniformity of the rows that compare vectors, and of those they were built on, whosever these are."""
    recipes = {key: read_recipe(one.row.path) for key, one in found.items()}
    rows = {key for key, recipe in recipes.items() if _is_contrastive(recipe)}
    rows |= {found[key].row.reported.after for key in rows}
    lines = []
    for key, one in every.items():
        for task in ("quora", "sts") if key in rows else ():
            values = [run["geometry"][task] for run in one.by_seed.values() if task in run.get("geometry", {})]
            if values:
                spread = " | ".join(_spread([value[name] for value in values]) for name in ("alignment", "uniformity"))
                name = one.row.name if key in found else key
                lines.append(f"| {name} | {LABELS[task]} | {values[0]['vectors']} | {spread} |")
    if not lines:
        return []
    head = ["| row | pairs | vectors | alignment | uniformity |", "|---|---|---|---|---|"]
    return [
        "Rows with a contrastive loss or stage, and what they were built on: how near the vectors of pairs that belong",
        "together are (alignment, lower is nearer), and how evenly all lie on the sphere (uniformity, lower is more evenly;",
        "Wang & Isola 2020, arXiv:2005.10242).",
        "",
        *head,
        *lines,
        "",
    ]


def _is_contrastive(recipe: Recipe) -> bool:
    return any(task.loss in CONTRASTIVE for part in (recipe, *recipe.stages) for task in part.tasks)


def _printed(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def _link(row: Row, folder: Path) -> str:
    name = row.reported.row or row.name
    return f"[{name}]({_relative(row.path, folder)})"


def _base(row: Row, folder: Path) -> str:
    """The row that it was built on."""
    after = row.reported.after
    return f"[{after}]({_relative(row.recipes / f'{after}.toml', folder)})" if after else ""


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _picture(folder: Path, name: str, text: str) -> str:
    """A figure and its caption below, where it was drawn."""
    place = Path("images") / "reproduction" / f"{name}.svg"
    return f"![{name}]({place.as_posix()})\n\n*{text}.*\n" if (folder / place).exists() else ""
