"""One self-contained HTML page on one run or several: scores, curves, confusion, calibration, the worst mistakes.

    write_report([Path("runs/sample")], Path("report.html"))

The page needs no network, no script and no build: report.html beside this file holds its frame and its CSS, `sections`
its parts, `charts` its pictures.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from minbert import __version__
from minbert.atomic import write_text
from minbert.errors import MinbertError, shown
from minbert.evaluation import sections
from minbert.evaluation.charts import Series, legend, line_chart
from minbert.evaluation.results import read_predictions, read_results
from minbert.evaluation.sections import RunData, figure, interval, number, table, text
from minbert.training.metrics_log import read_metrics

TEMPLATE = Path(__file__).with_name("report.html")
NEEDED = (
    *("name", "encoder", "seed", "kinds", "overall", "dev", "train", "tuned_on_dev"),
    *("steps", "planned_steps", "rows", "seconds", "data", "environment", "recipe"),
)


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Write the page on these runs' folders, in their order."""
    if not runs:
        raise MinbertError("no run given; expected the folder of a finished run, or several")
    found = [_read_results(folder) for folder in runs]
    data = [_read_run(*each) for each in zip(runs, found, _labels(runs, found), strict=True)]
    page = _page(data)
    try:
        # A lone surrogate, which JSON can hold, has no UTF-8
        write_text(output, page.encode("utf-8", "replace").decode())
    except OSError as error:
        raise MinbertError(f"{shown(output)}: cannot be written ({error.strerror})") from None


# --- reading --------------------------------------------------------------------------------------------------------


def _read_results(folder: Path) -> dict[str, Any]:
    if (folder / "recipe.toml").exists() and not (folder / "results.json").exists():
        raise MinbertError(
            f"{shown(folder)}: the run is not finished, there is no results.json; minbert train --resume goes on with it"
        )
    results = read_results(folder)
    missing = [key for key in NEEDED if key not in results]
    if missing:
        where = shown(folder / "results.json")
        raise MinbertError(f"{where}: has no {', '.join(missing)}; expected what minbert train writes")
    return results


def _read_run(folder: Path, results: dict[str, Any], label: str) -> RunData:
    metrics, recipe = folder / "metrics.jsonl", folder / "recipe.toml"
    return RunData(
        folder,
        label,
        results,
        read_metrics(metrics) if metrics.exists() else [],
        {task: read_predictions(folder, task).rows for task in results["dev"]},
        recipe.read_text(encoding="utf-8") if recipe.exists() else json.dumps(results["recipe"], indent=2),
    )


def _labels(folders: Sequence[Path], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The shortest names by which the runs can be told apart."""
    choices = [
        [str(results["name"]) for results in found],
        [f"{results['name']}, seed {results['seed']}" for results in found],
        [folder.resolve().name for folder in folders],
        [shown(folder) for folder in folders],
    ]
    for names in choices:
        if max(Counter(names).values()) == 1:
            return names
    return [f"{place}: {name}" for place, name in enumerate(choices[-1], start=1)]  # one folder given twice


# --- the page -------------------------------------------------------------------------------------------------------


def _page(runs: Sequence[RunData]) -> str:
    several = len(runs) > 1
    title = f"Comparison of {len(runs)} runs" if several else runs[0].label
    links = [("comparison", "Comparison")] if several else []
    for place, run in enumerate(runs, start=1):
        if several:
            links.append((f"run{place}", run.label))
        else:
            links += [(f"run{place}-{key}", name) for key, name in _contents(run)]
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=text(title),
        links="".join(f'<li><a href="#{anchor}">{text(name)}</a></li>' for anchor, name in links),
        body=(_comparison(runs) if several else "")
        + "".join(_run(run, f"run{place}") for place, run in enumerate(runs, start=1)),
        version=text(__version__),
    )


def _contents(run: RunData) -> list[tuple[str, str]]:
    """The parts of a run, by anchor and name."""
    tasks = [(f"task{place}", task) for place, task in enumerate(run.results["dev"], start=1)]
    vectors = [("vectors", "Sentence vectors")] if run.results.get("geometry") else []
    return [("scores", "Scores"), *tasks, *vectors, ("data", "Data and training"), ("recipe", "Recipe")]


def _run(run: RunData, anchor: str) -> str:
    cards = [_card(f"{anchor}-scores", "Scores", sections.scores(run))]
    cards += [
        _card(f"{anchor}-task{place}", task, _task(run, task)) for place, task in enumerate(run.results["dev"], start=1)
    ]
    if run.results.get("geometry"):
        cards.append(_card(f"{anchor}-vectors", "Sentence vectors", sections.geometry(run)))
    steps = (
        f'<div class="figures"><div class="wide">{sections.data_notes(run)}</div>{sections.learning_rate(run)}</div>'
    )
    cards.append(_card(f"{anchor}-data", "Data and training", steps))
    recipe = (
        "<details><summary>The resolved recipe, every default written out</summary>"
        f'<pre tabindex="0"><code>{text(run.recipe)}</code></pre></details>'
    )
    cards.append(_card(f"{anchor}-recipe", "Recipe", recipe))
    return f'<article id="{anchor}" aria-labelledby="{anchor}-name">{_header(run, anchor)}{"".join(cards)}</article>'


def _card(anchor: str, title: str, content: str) -> str:
    return (
        f'<section class="card" id="{anchor}" aria-labelledby="{anchor}-title">'
        f'<h3 id="{anchor}-title">{text(title)}</h3>{content}</section>'
    )


def _task(run: RunData, task: str) -> str:
    found = run.results["dev"][task]
    kind = f'<p class="kind">{text(run.results["kinds"][task])}, {found["rows"]:,} dev rows</p>'
    pictures = f'<div class="figures">{sections.curves(run, task)}{sections.answers(run, task)}{sections.word_overlap(run, task)}</div>'
    matrix = f"<h4>Confusion matrix</h4>{sections.confusion(task, found)}" if "confusion" in found else ""
    return f"{kind}{pictures}{matrix}<h4>Worst mistakes</h4>{sections.mistakes(run, task)}"


def _header(run: RunData, anchor: str) -> str:
    results, place = run.results, run.results["environment"]
    tiles = [(f"overall {rule}", number(value), "") for rule, value in results["overall"].items()]
    for task, found in results["dev"].items():
        measured = found["metrics"][found["metric"]]
        tiles.append((f"{task}, {found['metric']}", number(measured["value"]), interval(measured)))
    shown_tiles = "".join(
        f'<div class="tile"><dt>{text(name)}</dt><dd>{value}<small>{below}</small></dd></div>'
        for name, value, below in tiles
    )
    device = place.get("device_name") or ""
    facts = {
        "encoder": results["encoder"],
        "seed": results["seed"],
        "device": f"{place.get('device', 'unknown')} {f'({device})' if device else ''}",
        "commit": re.sub(r"\+$", " and changes", place.get("commit") or "unknown"),
        "minutes": f"{results['seconds'] / 60:.1f}",
        "folder": shown(run.folder),
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{text(value)}</dd></div>" for name, value in facts.items())
    about = f'<p class="about">{text(results["about"])}</p>' if results.get("about") else ""
    return (
        f'<header class="run"><h2 id="{anchor}-name">{text(run.label)}</h2>{about}{_sample_note(results)}'
        f'<dl class="tiles">{shown_tiles}</dl><dl class="facts">{listed}</dl></header>'
    )


def _sample_note(results: Mapping[str, Any]) -> str:
    if results["recipe"].get("data") != "embedded":
        return ""
    return (
        '<p class="warning" role="note"><strong>A run on the embedded sample.</strong> '
        "Its scores show that everything works; on so few rows they say nothing about quality.</p>"
    )


# --- several runs ---------------------------------------------------------------------------------------------------


def _comparison(runs: Sequence[RunData]) -> str:
    tasks = list(dict.fromkeys(task for run in runs for task in run.results["dev"]))
    content = _comparison_table(runs, tasks) + '<h4>Dev scores over the steps</h4><div class="figures">'
    for task in tasks:
        series = [
            Series(run.label, points, style) for style, run in enumerate(runs) if (points := run.scores("dev", task))
        ]
        metrics = {run.results["dev"][task]["metric"] for run in runs if task in run.results["dev"]}
        metric = metrics.pop() if len(metrics) == 1 else "score"
        label = f"Dev {metric} of {task} over the steps: {', '.join(each.name for each in series) or 'no run'}"
        drawn = line_chart(series, label=label, x_label="step", y_label=metric)
        content += figure(text(task), drawn + legend(series))
    return _card("comparison", "Comparison", content + "</div>" + _differences(runs))


def _comparison_table(runs: Sequence[RunData], tasks: Sequence[str]) -> str:
    rules = list(dict.fromkeys(rule for run in runs for rule in run.results["overall"]))
    columns: list[list[tuple[float | None, str]]] = [
        [(run.results["overall"].get(rule), "") for run in runs] for rule in rules
    ]
    for task in tasks:
        found = [run.results["dev"].get(task) for run in runs]
        columns.append([(None, "not a task of this run") if each is None else _primary(each) for each in found])
    rows = []
    for place, run in enumerate(runs):
        cells = "".join(_compared(column, place) for column in columns)
        rows.append(
            f'<tr><th scope="row"><a href="#run{place + 1}">{text(run.label)}</a></th>'
            f'<td>{text(run.results["encoder"])}</td><td class="n">{text(run.results["seed"])}</td>{cells}</tr>'
        )
    head = ["run", "encoder", "seed", *(f"overall {text(rule)}" for rule in rules), *(text(task) for task in tasks)]
    note = (
        "Bold is the highest of a column; below a task&rsquo;s score its metric and 95% interval. "
        "Whether two runs differ beyond chance is what <code>minbert compare</code> tells."
    )
    return table("The runs beside each other", head, rows, kind="compared") + f'<p class="note">{note}</p>'


def _primary(found: Mapping[str, Any]) -> tuple[float | None, str]:
    measured = found["metrics"][found["metric"]]
    return measured["value"], f"{text(found['metric'])}, {interval(measured)}"


def _compared(column: Sequence[tuple[float | None, str]], place: int) -> str:
    value, below = column[place]
    known = [each for each, _ in column if each is not None and math.isfinite(each)]
    best = ' class="n best"' if known and value == max(known) else ' class="n"'
    return f"<td{best}>{number(value)}{f'<small>{below}</small>' if below else ''}</td>"


def _differences(runs: Sequence[RunData]) -> str:
    """The settings in which the recipes differ."""
    flat = [_flat(run.results["recipe"]) for run in runs]
    for each, run in zip(flat, runs, strict=True):
        each["tasks"] = ", ".join(run.results["recipe"]["tasks"])
    shared = set.intersection(*(set(run.results["recipe"]["tasks"]) for run in runs))
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = []
    for key in keys:
        if key.startswith("tasks.") and key.split(".")[1] not in shared:
            continue  # told by the row of the tasks
        values = [each.get(key, "") for each in flat]
        if any(value != values[0] for value in values):
            cells = "".join(f"<td>{text(value)}</td>" for value in values)
            rows.append(f'<tr><th scope="row">{text(key)}</th>{cells}</tr>')
    if not rows:
        return '<p class="note">The recipes are the same.</p>'
    head = ["setting", *(text(run.label) for run in runs)]
    return "<h4>What differs between the recipes</h4>" + table("Settings that differ", head, rows)


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": str(value)}
    return flat
