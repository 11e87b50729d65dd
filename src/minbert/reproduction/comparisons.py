"""What docs/reproduction.md says of two rows beside each other: the findings, and by what their rows differ.

lines = findings_table(papers["hillebrand"], results["minilm"])
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from minbert.config import PaperConfig
from minbert.evaluation.metrics import overall_2023, overall_2024
from minbert.recipes import differences, read_recipe
from minbert.reproduction.findings import Difference
from minbert.reproduction.found import Found, verdicts
from minbert.reproduction.recipes import LABELS, MEAN, Finding, Paper
from minbert.tasks import BUILT_IN

COUNTED = {"sst", "quora", "sts"}
"""The tasks of a paper's overall score."""


def findings_table(paper: Paper, found: Mapping[str, Found]) -> list[str]:
    lines = ["| finding | on | theirs | ours, 95% interval | seeds | verdict |", "|---|---|---|---|---|---|"]
    for verdict in verdicts(paper, found):
        one = verdict.finding
        ours = "<br>".join(
            interval(difference, several=len(verdict.differences) > 1) for difference in verdict.differences
        )
        rows = f"`{one.better}` {'over' if one.kind == 'better' else 'no better than'} `{one.worse}`"
        rows += f", by {', '.join(f'`{key}`' for key in _changed(paper, one))}"
        on = LABELS.get(one.on, one.on)
        lines.append(
            f"| {one.claim} ({one.where}; {rows}) | {on} | {_their_difference(paper, one)} | {ours} | {verdict.seeds} | "
            f"**{verdict.word}**{f': {verdict.hindrance}' if verdict.seeds and verdict.hindrance else ''} |"
        )
    return lines


def _changed(paper: Paper, finding: Finding) -> list[str]:
    """The settings in which the two rows of a finding differ; those of the stages are one, and those of a task that only
    one of the rows has."""
    better, worse = (read_recipe(paper.rows[name].path) for name in (finding.better, finding.worse))
    lines = differences(replace(better, name=worse.name), worse)
    keys = [line.partition(": ")[0] for line in lines]
    alone = {task.name for task in better.tasks} ^ {task.name for task in worse.tasks}
    for whole in ("stages", *(f"tasks.{name}" for name in alone)):
        keys = [whole if key.startswith(f"{whole}.") else key for key in keys]
    return list(dict.fromkeys(keys))


def _their_difference(paper: Paper, finding: Finding) -> str:
    better, worse = (paper.rows[name].reported for name in (finding.better, finding.worse))
    shared = [task for task in better.dev if task in worse.dev]
    if finding.on == MEAN:
        pairs = [("", _their_overall(better), _their_overall(worse))]
    else:
        tasks = [finding.on] if finding.on in LABELS else shared
        several = len(tasks) > 1
        pairs = [(f"{LABELS[t]} " if several else "", better.dev.get(t), worse.dev.get(t)) for t in tasks]
    return "<br>".join(f"{label}{a - b:+.3f}" for label, a, b in pairs if a is not None and b is not None)


def _their_overall(reported: PaperConfig) -> float | None:
    """As printed; where only the three scores are, what the paper's rule makes of them."""
    if "dev" in reported.overall or not reported.dev.keys() >= COUNTED:
        return reported.overall.get("dev")
    scores = {task: reported.dev[task] for task in COUNTED}
    kinds = {task: BUILT_IN[task].kind for task in COUNTED}
    return overall_2024(scores, kinds) if reported.rule == "2024" else overall_2023(scores)


def interval(difference: Difference, *, several: bool) -> str:
    label = f"{LABELS.get(difference.on, difference.on)} " if several else ""
    if not difference.values:
        return ""
    if len(difference.values) > 1 and not any(difference.values):
        return f"{label}0: the same score with every seed"
    ends = f" ({difference.low:+.3f} to {difference.high:+.3f})" if math.isfinite(difference.half) else ""
    return f"{label}{difference.mean:+.3f}{ends}"
