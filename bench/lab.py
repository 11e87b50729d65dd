"""Tables of what the lab log tells, from results/, for bench.numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench import scores
from bench.scores import NOT_YET, TASKS, Run, is_older, overall, runs, score
from minbert.evaluation.mistakes import BOLD, load_mistakes
from minbert.evaluation.slices import FEW, columns_of


def row(name: str, found: Sequence[Run]) -> str:
    """Mean over seeds of the mean and of each task."""
    totals = [overall(run) for run in found]
    cells = " | ".join(f"{statistics.mean(score(run, task) for run in found):.3f}" for task in TASKS)
    return f"| {name} | {statistics.mean(totals):.4f} | {min(totals):.4f}, {max(totals):.4f} | {cells} |"


def six_epochs() -> str:
    head = ["| 6 epochs, 3 seeds | mean | lowest, highest | SST | Quora | STS |", "|---|---|---|---|---|---|"]
    variants = (("linear heads", "multitask-6epochs-seed*.json"), ("PH heads", "multitask-6epochs-ph-seed*.json"))
    return "\n".join([*head, *(row(name, runs("lab", pattern)) for name, pattern in variants), ""])


def mlm_first() -> str:
    """The recipe for all tasks with and without a stage of masked-language modelling before it."""
    groups = {
        "`multitask`": runs("multitask", "seed*.json"),
        "`beyond/mlm-first`": runs("reproduction", "minilm", "beyond", "mlm-first", "seed*.json"),
    }
    lines = ["| minilm, dev | mean | lowest, highest | SST | Quora | STS | seeds |", "|---|---|---|---|---|---|---|"]
    lines += [f"{row(name, found)} {len(found)} |" for name, found in groups.items() if found]
    return "\n".join([*lines, ""])


_SCORES = " | ".join([*TASKS.values(), "overall"])
COSINES = {
    "hillebrand": "hillebrand/6-concatenation",
    "vinjapuri": "vinjapuri-vasireddy/4-cosine",
    "negatives": "vinjapuri-vasireddy/6-negative-sampling",
}


def plain_cosine() -> str:
    """STS with the dropout before the cosine and without, after each epoch: the evaluations that the runs logged."""
    lines = ["| STS on dev, minilm | seed | with, by epoch | without |", "|---|---|---|---|"]
    folder = scores.RESULTS / "lab" / "plain-cosine"
    for name, row in COSINES.items():
        for path in sorted((folder / "with").glob(f"{name}-seed*.jsonl")):
            cells = [
                ", ".join(f"{one:.3f}" for one in _logged(folder / side / path.name)) for side in ("with", "without")
            ]
            lines.append(f"| `{row}` | {path.stem.rpartition('seed')[2]} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def plain_cosine_whole() -> str:
    """Hillebrand's best row, whole runs with that dropout and without."""
    lines = [f"| `{COSINES['hillebrand']}` | dropout | {_SCORES} | seeds |", "|---|---|---|---|---|---|---|"]
    for encoder in ("minilm", "mpnet"):
        sides = {
            "with": runs("lab", "plain-cosine", "whole-with", f"{encoder}-seed*.json"),
            "without": runs("reproduction", encoder, *COSINES["hillebrand"].split("/"), "seed*.json"),
        }
        lines += [f"| {encoder} | {side} | {_over_seeds(found, '2024')} |" for side, found in sides.items()]
    return "\n".join([*lines, ""])


def _over_seeds(found: Sequence[Run], rule: str) -> str:
    """The cells under these scores, mean and standard deviation, and how many seeds."""
    columns = [[score(run, task) for run in found] for task in TASKS]
    columns.append([run["overall"][rule] for run in found])
    cells = [f"{statistics.mean(values):.3f}" for values in columns]
    if len(found) > 1:
        cells = [f"{cell} ± {statistics.stdev(values):.3f}" for cell, values in zip(cells, columns, strict=True)]
    return " | ".join([*cells, str(len(found))])


LAST_LAYERS = {
    "PH": ("03-round-robin-ph", "05-cl", "08-mt-dnn"),
    "DPH for Quora, PH": ("09-dph",),
    "DPHA": ("11-dpha-both", "14-dropout-0.1"),
}


def last_layer() -> str:
    """Rows by their heads over both orders, whose last layer began too small, and as they are now."""
    lines = [
        f"| `mohammed-sabane/`, dev | encoder | heads | last layer | {_SCORES} | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kinds = [("minilm", heads, name) for heads, names in LAST_LAYERS.items() for name in names]
    for encoder, heads, name in (*kinds, ("mpnet", "DPHA", "14-dropout-0.1")):
        sides = {
            "small": runs("lab", "last-layer", encoder, f"{name}-seed*.json"),
            "as now": runs("reproduction", encoder, "mohammed-sabane", name, "seed*.json"),
        }
        for side, found in sides.items():
            lines.append(f"| `{name}` | {encoder} | {heads} | {side} | {_over_seeds(found, '2023')} |")
    return "\n".join([*lines, ""])


def cycles() -> str:
    """SST where whole datasets take turns, by the dataset that ends the cycle."""
    lines = [
        "| `mohammed-sabane/`, minilm | a cycle | SST on dev, by seed | on its own training rows |",
        "|---|---|---|---|",
    ]
    for name in ("03-round-robin-ph", "04-cl-batch16", "05-cl", "06-cl-dropout"):
        found = runs("reproduction", "minilm", "mohammed-sabane", name, "seed*.json")
        (order,) = {", ".join(TASKS[task] for task in run["recipe"]["sampler"]["order"]) for run in found}
        cells = [", ".join(f"{score(run, 'sst', part):.3f}" for run in found) for part in ("dev", "train")]
        lines.append(f"| `{name}` | {order} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def more_epochs() -> str:
    """Hillebrand's best row with ten epochs and with fifteen, seed by seed: the epoch that is kept and its scores."""
    lines = [
        f"| minilm | seed | epoch kept | {' | '.join(TASKS.values())} | overall |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("6-concatenation", "7-more-epochs"):
        for run in runs("reproduction", "minilm", "hillebrand", name, "seed*.json"):
            kept = max(one["epoch"] for one in run["reproduction"]["history"] if one["kept"])
            cells = [f"{value:.4f}" for value in (*(score(run, task) for task in TASKS), run["overall"]["2024"])]
            lines.append(f"| `hillebrand/{name}` | {run['seed']} | {kept} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def repeated_texts() -> str:
    """Contrastive stages whose batches may hold a text twice, and with batches that hold none, seed by seed."""
    rows = ("3.1-simcse-unsupervised", "15-simcse", "3.2-ranking-loss")
    lines = [
        f"| `mohammed-sabane/`, minilm | seed | a text twice | {' | '.join(TASKS.values())} | overall |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in rows:
        sides = {told: runs("lab", "repeated-texts", told, f"{name}-seed*.json") for told in ("may-be", "never")}
        for pair in zip(*sides.values(), strict=True):
            for told, run in zip(sides, pair, strict=True):
                cells = [f"{value:.3f}" for value in (*(score(run, task) for task in TASKS), overall(run))]
                lines.append(f"| `{name}` | {run['seed']} | {told.replace('-', ' ')} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _logged(path: Path) -> list[float]:
    """STS on dev in each evaluation of a metrics.jsonl."""
    return [json.loads(line)["scores"]["dev"]["sts"] for line in path.read_text(encoding="utf-8").splitlines()]


DIFFERENCES = (
    *(f"hillebrand/{name}" for name in ("2-multi-dataset", "3-cosine-similarity", "4-mean-pooling", "5-multi-task")),
    "beyond/absolute-difference",
    "hillebrand/6-concatenation",
)
"""Rows in which Quora's head reads u - v, then those in which it reads |u - v|."""


def difference() -> str:
    """Quora in whole runs of these rows: how often right, how well ordered, and how often the answer is yes."""
    lines = ["| Quora on dev, minilm | accuracy | ROC area | answered yes | seeds |", "|---|---|---|---|---|"]
    labels = set()
    for key in DIFFERENCES:
        found = [run["dev"]["quora"] for run in runs("reproduction", "minilm", *key.split("/"), "seed*.json")]
        if not found:
            continue
        columns = [[one["metrics"][name]["value"] for one in found] for name in ("accuracy", "roc-auc")]
        tables = [one["confusion"] for one in found]  # rows are labels, columns answers
        columns.append([sum(answers[1] for answers in table) / sum(map(sum, table)) for table in tables])
        labels |= {f"{sum(table[1]) / sum(map(sum, table)):.3f}" for table in tables}
        lines.append(f"| `{key}` | {' | '.join(_spread(values) for values in columns)} | {len(found)} |")
    note = f"Means over the seeds (lowest to highest). Of the labels {' or '.join(sorted(labels))} are yes."
    return "\n".join([*lines, "", note, ""]) if labels else NOT_YET


def future_work() -> str:
    """What starts from Hillebrand's best row, and that row: whole runs, with the dropout before the cosine that each had."""
    best = COSINES["hillebrand"]
    groups = [
        (best, encoder, runs("lab", "plain-cosine", "whole-with", f"{encoder}-seed*.json"))
        for encoder in ("minilm", "mpnet")
    ]
    for encoder, key in (
        ("minilm", best),
        ("mpnet", best),
        ("minilm", "beyond/abbreviations-first"),
        ("minilm", "beyond/verb-pooling"),
    ):
        groups.append((key, encoder, runs("reproduction", encoder, *key.split("/"), "seed*.json")))
    lines = ["| recipe | encoder | dropout before the cosine | overall | seeds |", "|---|---|---|---|---|"]
    for key, encoder, found in groups:
        if not found:
            continue
        recipes = [run["recipe"] for run in found]
        dropouts = {one["tasks"]["sts"].get("dropout", one["model"]["dropout"]) for one in recipes}
        dropout = " or ".join(f"{value:g}" for value in sorted(dropouts))
        totals = [run["overall"]["2024"] for run in found]
        lines.append(f"| `{key}` | {encoder} | {dropout} | {_spread(totals)} | {len(found)} |")
    return "\n".join([*lines, ""])


def _spread(values: Sequence[float]) -> str:
    """The mean, and the least and the most of several."""
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


EXPLANATIONS = {
    ("quora", "words in common"): 1,
    ("quora", "words of the longer text"): 2,
    ("sst", "a negation"): 0,
    ("sst", "a contrast"): 0,
    ("sst", "a word of degree"): 0,
    ("quora", "numbers"): 1,
    ("sts", "numbers"): 1,
    ("quora", "initials for a name"): 2,
    ("sts", "initials for a name"): 1,
}
"""Which column of a division of the mistakes each explanation is about."""


def explanations() -> str:
    """What the papers say of mistakes, asked of Hillebrand's best row with mpnet, seed by seed."""
    paths = sorted((scores.RESULTS / "reproduction" / "mpnet" / COSINES["hillebrand"]).glob("mistakes-seed*.json"))
    if not paths:
        return NOT_YET
    tasks = [{each.task: each for each in load_mistakes(path)} for path in paths]
    seeds = [path.stem.rpartition("seed")[2] for path in paths]
    lines = [
        f"| task | texts | | rate | of rows | {' | '.join(f'seed {seed}' for seed in seeds)} |",
        "|" + "---|" * (5 + len(seeds)),
    ]
    for (task, by), column in EXPLANATIONS.items():
        name = columns_of(tasks[0][task].classes)[column]
        for group in [part.group for part in tasks[0][task].slices if part.by == by]:
            rates, cells = [], []
            for slices in (found[task].slices for found in tasks):
                (rate,) = (part.rates[column] for part in slices if (part.by, part.group) == (by, group))
                unusual = rate.differs(slices[0].rates[column].value)
                rates.append(rate)
                cells.append(rate.interval if rate.rows < FEW else f"**{rate}**" if unusual else str(rate))
            lines.append(f"| {TASKS[task]} | {by} | {group} | {name} | {rates[0].rows:,} | {' | '.join(cells)} |")
    age = " Made before the recipe was last changed." if any(map(is_older, paths)) else ""
    return "\n".join([*lines, "", f"`{COSINES['hillebrand']}` with mpnet.{age} {BOLD}", ""])
