"""One encoder that understands sentences for many tasks at once.

    import minbert

    run = minbert.train("recipes/sample.toml")
    model = minbert.load(run.model)
    model.predict(["What a lovely day."])

Importing this imports no torch; each function brings in what it needs when it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minbert.errors import MinbertError, require

if TYPE_CHECKING:
    from minbert.config import Recipe
    from minbert.delivery.export import Exported
    from minbert.delivery.predictor import Predictor
    from minbert.evaluation.evaluate import Evaluation
    from minbert.experiment import Run

__version__ = "0.1.0"
__all__ = ["MinbertError", "ensemble", "evaluate", "export", "load", "predict", "read_recipe", "train"]


def load(model: str | Path, *, device: str = "cpu") -> Predictor:
    """A trained model, ready to answer.

    Args:
        model: a model folder, such as RUN/model, or one of `minbert export --to onnx`, which needs no torch.
        device: "cpu", "cuda" or "auto".
    """
    from minbert.delivery.predictor import Predictor

    return Predictor.load(model, device=device)


def train(recipe: Recipe | str | Path | Mapping[str, Any], **options: Any) -> Run:
    """Train a recipe (a file, a dictionary of the same shape, or a `Recipe`) and evaluate the chosen model.

    The options are those of `minbert.experiment.train`: out, data, device, resume, overwrite, watcher.
    """
    require("torch", "train", "minbert.train")
    from minbert.experiment import train as train_recipe

    return train_recipe(recipe, **options)


def evaluate(
    model: str | Path,
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    *,
    data: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Evaluation]:
    """Every metric of a model on dev, with bootstrap 95% intervals, by task.

    Args:
        model: a model folder, or an export's.
        recipe: other files for the same tasks; without it those the model was trained for.
        data: where the files lie.
    """
    from minbert.evaluating import evaluate_model
    from minbert.recipes import as_recipe

    return evaluate_model(model, None if recipe is None else as_recipe(recipe), data=data, device=device)


def ensemble(out: str | Path, models: Sequence[str | Path], **options: Any) -> Path:
    """Write a model folder whose answers are the mean of some models' answers; returns it.

    The options are those of `minbert.ensembles.ensemble`: overwrite, tune, data, device, watcher.
    """
    require("torch", "train", "minbert.ensemble")
    from minbert.ensembles import ensemble as write_ensemble

    return write_ensemble(out, models, **options)


def export(model: str | Path, *, to: str, out: str | Path, **options: Any) -> Exported:
    """Write a model in a form that others load: onnx, onnx-int8, sentence-transformers, transformers or torch.

    The options are those of `minbert.exporting.export`: data, overwrite, measured, tolerance, watcher.
    """
    require("torch", "train", "minbert.export")
    from minbert.exporting import export as write_export

    return write_export(model, to=to, out=out, **options)


def predict(
    model: str | Path,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    tasks: Iterable[str] | None = None,
    device: str = "cpu",
) -> dict[str, list[dict[str, Any]]]:
    """Answers of a model for some texts or pairs, by task. To ask more than once, `load` it."""
    return load(model, device=device).predict(texts, pairs, tasks=tasks)


def read_recipe(path: str | Path, *, sets: Iterable[str] = (), seed: int | None = None) -> Recipe:
    """A recipe file, changed by settings such as "training.epochs=3"."""
    from minbert.recipes import read_recipe as read

    return read(path, sets=sets, seed=seed)
