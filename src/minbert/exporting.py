"""Export a model folder: find its texts, its data and its recipe, and have `delivery/export.py` write the form.

found = export("runs/sample/model", to="onnx", out="sample-onnx")
print(found.folder, max(found.differences.values()))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minbert.config import SAMPLE, Recipe, data_folder
from minbert.data.raw import read_split
from minbert.delivery.card import Card
from minbert.delivery.export import FORMS, Exported, Form, export_model
from minbert.delivery.exported import is_export
from minbert.delivery.predictor import Predictor
from minbert.encoders import weight_files
from minbert.errors import MinbertError, shown, suggest
from minbert.evaluating import prepare_dev
from minbert.evaluation.bootstrap import paired_bootstrap
from minbert.evaluation.evaluate import judge, labels_of
from minbert.evaluation.metrics import metrics_of
from minbert.machine import set_threads
from minbert.model.manifest import read_manifest
from minbert.preparing import Preparing, Unwatched

ROWS = 32  # of each task's dev rows, to compare an export with the model
MEASURED = 2000  # of each task's dev rows, to measure what int8 costs
TOLERANCE = 0.02  # of a metric, that int8 may cost


def export(
    model: str | Path,
    *,
    to: str,
    out: str | Path,
    data: str | Path | None = None,
    overwrite: bool = False,
    measured: int = MEASURED,
    tolerance: float = TOLERANCE,
    watcher: Preparing | None = None,
) -> Exported:
    """Write a model in another form, compared with the model itself before it appears.

    Args:
        model: a model folder, such as RUN/model, or a run's.
        to: onnx, onnx-int8, sentence-transformers, transformers or torch.
        out: the new folder.
        data: where the tasks' files lie. Their dev rows are compared with (without it, those that the model was trained
            on where they are there, and else the embedded sample's), and what int8 loses is measured on them.
        overwrite: replace a folder that is there.
        measured: so many dev rows of each task, drawn at random, are what int8 is measured on; 0: all of them.
        tolerance: int8 may cost so much of a task's metric there. One that costs more, and whose interval says that this
            is no chance, is not written; one that may have by chance is written with a warning.
    """
    if to not in FORMS:
        raise MinbertError(f'the form is "{to}"{suggest(to, FORMS)}; expected one of: {", ".join(FORMS)}')
    form: Form = to
    folder, target = Path(model), Path(out)
    if not (folder / "minbert.json").exists() and (folder / "model" / "minbert.json").exists():
        folder = folder / "model"
    if is_export(folder):
        raise MinbertError(f"{shown(folder)}: an export already; expected the model folder that it was made of")
    about = read_manifest(folder)
    if about.members:
        found = f"an ensemble of {len(about.members)} models"
        raise MinbertError(f"{shown(folder)}: {found}; expected one of them, such as {about.members[0]}")
    if target.exists() and not overwrite:
        raise MinbertError(f"{shown(target)}: is there already; expected a new folder, or --overwrite")
    if target.exists() and not any((target / name).exists() for name in ("manifest.json", "config.json")):
        raise MinbertError(f"{shown(target)}: holds no export; not replaced")
    set_threads()
    watcher = watcher or Unwatched()
    predictor = Predictor.load(folder)
    card = Card(name=target.resolve().name, recipe=_recipe(folder))

    def measure(near: Predictor) -> Mapping[str, Mapping[str, Any]]:
        losses = measure_loss(predictor, near, rows=measured, data=data, watcher=watcher)
        for message in check_losses(losses, tolerance):
            watcher.warn(message)
        return losses

    return export_model(
        predictor,
        form,
        target,
        rows=_rows(predictor, data),
        card=card,
        measure=measure,
        encoder_files=weight_files(folder / "encoder"),
    )


def measure_loss(
    exact: Predictor,
    near: Predictor,
    *,
    rows: int = MEASURED,
    data: str | Path | None = None,
    watcher: Preparing | None = None,
) -> dict[str, dict[str, Any]]:
    """What each task's metric on dev becomes with the second predictor: both values, and their difference with a paired
    bootstrap 95% interval. Of more than so many rows of a task, if not 0, some are drawn."""
    watcher = watcher or Unwatched()
    manifest = exact.manifest
    asked = tuple(task for task in manifest.tasks if not task.is_masked)
    recipe = Recipe(asked, data=manifest.data, model=manifest.model)
    prepared = prepare_dev(exact, recipe, data=data, watcher=watcher)
    rng = np.random.default_rng(Recipe.seed)
    losses = {}
    for task in asked:
        inputs = prepared.inputs["dev"][task.name]
        total = len(inputs)
        if 0 < rows < total:
            inputs = inputs.take(np.sort(rng.permutation(total)[:rows]))
        watcher.preparing(f"measuring int8 on {len(inputs):,} of {total:,} dev rows of {task.name}")
        labels, metric = labels_of(inputs), metrics_of(task.kind)[task.metric_name]
        decision = manifest.decisions.get(task.name)
        answers = [judge(task, one.outputs_of(inputs), decision) for one in (exact, near)]
        read = [one.probabilities if metric.reads == "probabilities" else one.predictions for one in answers]
        values = [float(metric(labels, one)) for one in read]  # type: ignore[arg-type]
        found = paired_bootstrap(metric, labels, *read, rng=rng, samples=1000).difference  # type: ignore[arg-type]
        losses[task.name] = {
            "metric": task.metric_name,
            "rows": len(labels),
            "of": total,
            "fp32": values[0],
            "int8": values[1],
            "difference": found.value,
            "low": found.low,
            "high": found.high,
        }
    return losses


def check_losses(losses: Mapping[str, Mapping[str, Any]], tolerance: float) -> list[str]:
    """What to warn of; an error where a task lost more than the tolerance, and not by chance."""
    warnings = []
    for name, loss in losses.items():
        if math.isnan(loss["fp32"]) or loss["difference"] >= -tolerance:
            continue
        said = (
            f"int8 costs {name} {-loss['difference']:.4f} of its {loss['metric']} on {loss['rows']:,} dev rows "
            f"({loss['fp32']:.4f} to {loss['int8']:.4f}, 95% interval {loss['low']:+.4f} to {loss['high']:+.4f}); "
            f"expected at most {tolerance:g}"
        )
        if not loss["high"] >= -tolerance:  # nor is a NaN
            raise MinbertError(f"{said}: not written; --tolerance allows more, --to onnx is exact")
        warnings.append(f"{said}; that may be chance: measure on more rows")
    return warnings


def _rows(predictor: Predictor, data: str | Path | None) -> list[tuple[str, str]]:
    """Real sentences, in pairs, and one that is longer than the model reads."""
    manifest = predictor.manifest
    folder = data_folder(Recipe(manifest.tasks, data=manifest.data), data)
    rows: list[tuple[str, str]] = []
    for task in manifest.tasks:
        try:
            examples = read_split(task, "dev", folder)
        except MinbertError:
            if data is not None:
                raise
            continue  # the data are not here any more: the sample's sentences do as well
        texts = list(examples.texts)[:ROWS]
        others = list(examples.pairs or (*examples.texts[1:], *examples.texts[:1]))[:ROWS]
        rows += zip(texts, others, strict=True)
    if not rows:
        for path in (SAMPLE / "paraphrase-dev.tsv", SAMPLE / "similarity-dev.tsv"):
            lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1 : 1 + ROWS]]
            rows += [(line[1], line[2]) for line in lines]
    rows = list(dict.fromkeys(row for row in rows if all(row)))
    long = " ".join(text for row in rows for text in row)
    words = long.split() * (1 + predictor.max_tokens // max(1, len(long.split())))
    return [*rows, (" ".join(words[: predictor.max_tokens + 10]), rows[0][1])]


def _recipe(folder: Path) -> str:
    """The resolved recipe of the run that the model lies in."""
    path = folder.resolve().parent / "recipe.toml"
    return path.read_text(encoding="utf-8") if path.is_file() else ""
