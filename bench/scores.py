"""Tables of dev scores from results/ for README, recipes and docs, for bench.numbers; those of the lab log are in lab.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minbert.evaluation.mistakes import load_mistakes, markdown
from minbert.reproduction.findings import DID_NOT_HOLD, HELD, NOT_COMPARED, UNDECIDED
from minbert.reproduction.found import Found, load_results, verdicts
from minbert.reproduction.recipes import MEAN, Paper, Row, find_papers

RESULTS = Path(__file__).parent.parent / "results"
RECIPES = RESULTS.parent / "recipes"
TASKS = {"sst": "SST", "quora": "Quora", "sts": "STS"}
NOT_YET = "Not measured yet.\n"
Run = Mapping[str, Any]


def runs(*parts: str) -> list[Run]:
    """The runs whose files match, by name."""
    *folder, pattern = parts
    found = sorted(RESULTS.joinpath(*folder).glob(pattern))
    return [json.loads(path.read_text(encoding="utf-8")) for path in found]


def score(run: Run, task: str, part: str = "dev") -> float:
    found = run[part][task]
    return found["metrics"][found["metric"]]["value"]


def overall(run: Run) -> float:
    return run["overall"]["2023"]


def multitask() -> str:
    """Dev scores of recipes/multitask.toml over its seeds: means, and the spread between seeds."""
    found = runs("multitask", "seed*.json")
    if not found:
        return NOT_YET
    values = {"mean of the three": [overall(run) for run in found]}
    values |= {
        f"{label} {_metric(found[0], task)}": [score(run, task) for run in found] for task, label in TASKS.items()
    }
    lines = [
        f"| `recipes/multitask.toml`, dev, {_seeds(found)} | mean | lowest | highest |",
        "|---|---|---|---|",
        *(f"| {name} | {statistics.mean(row):.4f} | {min(row):.4f} | {max(row):.4f} |" for name, row in values.items()),
        "",
        f"Encoder: {found[0]['encoder']}, which has seen Quora questions in its own training; the papers this follows",
        "started from bert-base-uncased, which has not.",
        "",
    ]
    return "\n".join(lines)


def fast_plain() -> str:
    """The fast path against the plain one, seed by seed."""
    fast = {run["seed"]: run for run in runs("multitask", "seed*.json")}
    plain = {run["seed"]: run for run in runs("multitask-plain", "seed*.json")}
    shared = sorted(fast.keys() & plain.keys())
    if not shared:
        return NOT_YET
    lines = [
        f"| dev, {len(shared)} seeds | fast | plain | difference of the means | of the seeds: lowest, highest |",
        "|---|---|---|---|---|",
    ]
    measures = {"mean": overall} | {label: lambda run, task=task: score(run, task) for task, label in TASKS.items()}
    for name, measure in measures.items():
        pairs = [(measure(fast[seed]), measure(plain[seed])) for seed in shared]
        gaps = [a - b for a, b in pairs]
        left, right = (statistics.mean(side) for side in zip(*pairs, strict=True))
        lines.append(
            f"| {name} | {left:.4f} | {right:.4f} | {left - right:+.4f} | {min(gaps):+.4f}, {max(gaps):+.4f} |"
        )
    spreads = [max(side) - min(side) for side in ([overall(found[seed]) for seed in shared] for found in (fast, plain))]
    seconds = [statistics.mean(found[seed]["seconds"] for seed in shared) for found in (fast, plain)]
    lines += [
        "",
        f"Between seeds of one path the mean differs by up to {spreads[0]:.4f} (fast) and {spreads[1]:.4f} (plain).",
        f"A run takes {seconds[0]:,.0f} s (fast) and {seconds[1]:,.0f} s (plain) on {_device(fast, plain)}.",
        "",
    ]
    return "\n".join(lines)


def papers() -> str:
    """Of each paper its best row, theirs and ours, and how many of its findings held."""
    known = find_papers(RECIPES)
    results = load_results(known, RESULTS / "reproduction")
    words = (HELD, DID_NOT_HOLD, UNDECIDED, NOT_COMPARED)
    columns = ["paper", "rows", "its best row, their overall", *results, *(f"findings: {words[0]}", *words[1:])]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    claimed = [paper for paper in known.values() if paper.claims.best]
    for paper in claimed:
        best = paper.rows[paper.claims.best]
        cells = [paper.claims.title, str(len(paper.rows)), f"{best.reported.row}: {_their_overall(paper)}"]
        cells += [_our_overall(found.get(best.key)) for found in results.values()]
        judged = [verdict.word for verdict in verdicts(paper, next(iter(results.values()), {}))]
        lines.append(f"| {' | '.join([*cells, *(str(judged.count(word)) for word in words)])} |")
    keys = [paper.rows[paper.claims.best].key for paper in claimed]
    seeds = {name: {len(found[key].by_seed) for key in keys if key in found} for name, found in results.items()}
    over = ", ".join(f"{name} over {' or '.join(map(str, sorted(counts)))}" for name, counts in seeds.items())
    first = next(iter(results), "no encoder")
    best_rows = {paper.claims.title.partition(",")[0]: paper.rows[paper.claims.best] for paper in claimed}
    shifted = " and ".join(name for name, row in best_rows.items() if row.reported.rule == "2024")
    note = (
        "Overall on dev of the course's SST, Quora and STS, by the rule of the paper's table: the mean of the three; of "
        f"{shifted} with the correlation r as (r + 1) / 2. Seeds: {over}. The findings are judged with {first}."
    )
    return "\n".join([*lines, "", note, ""])


def errors() -> str:
    """The error analysis of the best run: of those whose mistakes `minbert reproduce` kept, the one with the highest mean."""
    kept = sorted((RESULTS / "reproduction").glob("*/*/*/mistakes-seed*.json"))
    scored = [(json.loads(_result_of(path).read_text(encoding="utf-8")), path) for path in kept]
    if not scored:
        return NOT_YET
    best, path = max(scored, key=lambda pair: overall(pair[0]))
    head = [
        f"`recipes/{best['reproduction']['row']}.toml` with {best['encoder']}, seed {best['seed']}, {best['steps']:,} steps:",
        f"a plain mean of {overall(best):.3f} on the course's dev sets."
        + (" Made before the recipe was last changed." if is_older(path) else ""),
        "",
    ]
    return "\n".join([*head, *markdown(load_mistakes(path), texts=False), ""])


def _result_of(mistakes: Path) -> Path:
    return mistakes.with_name(mistakes.name.removeprefix("mistakes-"))


def is_older(mistakes: Path) -> bool:
    """Are they of a run that was made before its recipe was last changed?"""
    run = json.loads(_result_of(mistakes).read_text(encoding="utf-8"))
    recipe = RECIPES / f"{run['reproduction']['row']}.toml"
    row = Row(recipe.parent.name, recipe.stem, recipe)
    return recipe.exists() and not Found(row, mistakes.parents[2].name, {run["seed"]: run}).is_current


def _their_overall(paper: Paper) -> str:
    reported = paper.rows[paper.claims.best].reported.overall
    return f"{reported['dev']:.3f}" if "dev" in reported else f"{reported['test']:.3f} on test"


def _our_overall(row: Found | None) -> str:
    if row is None:
        return ""
    notes = [f"{min(row.shares.values()):.0%} of the steps"] if row.caps else []
    notes += [] if row.is_current else ["of an older recipe or head"]
    return f"{statistics.mean(row.values(MEAN)):.3f}" + (f" ({', '.join(notes)})" if notes else "")


def _metric(run: Run, task: str) -> str:
    return {"pearson": "Pearson"}.get(run["dev"][task]["metric"], run["dev"][task]["metric"])


def _seeds(found: Sequence[Run]) -> str:
    return f"{len(found)} seed{'s' if len(found) > 1 else ''}"


def _device(*groups: Mapping[int, Run]) -> str:
    names = {run["environment"]["device_name"] for group in groups for run in group.values()}
    return " and ".join(sorted(names))
