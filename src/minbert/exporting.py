"""Export a model folder: find its texts, its data and its recipe, and have `delivery/export.py` write the form.

found = export("runs/sample/model", to="onnx", out="sample-onnx")
print(found.folder, max(found.differences.values()))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minbert.config import SAMPLE, Recipe, data_folder
from minbert.data.raw import read_split
from minbert.delivery.card import Card
from minbert.delivery.export import FORMS, Exported, Form, export_model
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError, shown, suggest
from minbert.evaluating import dev_outputs
from minbert.evaluation.bootstrap import paired_bootstrap
from minbert.evaluation.evaluate import judge
from minbert.evaluation.metrics import metrics_of
from minbert.machine import set_threads
from minbert.model.manifest import read_manifest
from minbert.preparing import Preparing

ROWS = 32  # of each task's dev rows, to compare an export with the model


def export(
    model: str | Path,
    *,
    to: str,
    out: str | Path,
    data: str | Path | None = None,
    overwrite: bool = False,
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
    """
    if to not in FORMS:
        raise MinbertError(f'the form is "{to}"{suggest(to, FORMS)}; expected one of: {", ".join(FORMS)}')
    form: Form = to
    folder, target = Path(model), Path(out)
    if not (folder / "minbert.json").exists() and (folder / "model" / "minbert.json").exists():
        folder = folder / "model"
    about = read_manifest(folder)
    if about.members:
        found = f"an ensemble of {len(about.members)} models"
        raise MinbertError(f"{shown(folder)}: {found}; expected one of them, such as {about.members[0]}")
    if target.exists() and not overwrite:
        raise MinbertError(f"{shown(target)}: is there already; expected a new folder, or --overwrite")
    if target.exists() and not any((target / name).exists() for name in ("manifest.json", "config.json")):
        raise MinbertError(f"{shown(target)}: holds no export; not replaced")
    set_threads()
    predictor = Predictor.load(folder)
    card = Card(name=target.resolve().name, recipe=_recipe(folder))

    def measure(near: Predictor) -> Mapping[str, Mapping[str, Any]]:
        return measure_loss(predictor, near, data=data, watcher=watcher)

    return export_model(predictor, form, target, rows=_rows(predictor, data), card=card, measure=measure)


def measure_loss(
    exact: Predictor, near: Predictor, *, data: str | Path | None = None, watcher: Preparing | None = None
) -> dict[str, dict[str, Any]]:
    """What each task's metric on dev becomes with the second predictor: both values, and their difference with a paired
    bootstrap 95% interval."""
    manifest = exact.manifest
    asked = tuple(task for task in manifest.tasks if not task.is_masked)
    recipe = Recipe(asked, data=manifest.data, model=manifest.model)
    before, after = (dev_outputs(one, recipe, data=data, watcher=watcher) for one in (exact, near))
    rng = np.random.default_rng(Recipe.seed)
    losses = {}
    for task in asked:
        labels, metric = before[task.name][0], metrics_of(task.kind)[task.metric_name]
        decision = manifest.decisions.get(task.name)
        answers = [judge(task, outputs[task.name][1], decision) for outputs in (before, after)]
        read = [one.probabilities if metric.reads == "probabilities" else one.predictions for one in answers]
        values = [float(metric(labels, one)) for one in read]  # type: ignore[arg-type]
        found = paired_bootstrap(metric, labels, *read, rng=rng, samples=1000).difference  # type: ignore[arg-type]
        losses[task.name] = {
            "metric": task.metric_name,
            "rows": len(labels),
            "fp32": values[0],
            "int8": values[1],
            "difference": found.value,
            "low": found.low,
            "high": found.high,
        }
    return losses


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
