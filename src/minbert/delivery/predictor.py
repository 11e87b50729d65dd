"""The one way to run a trained model.

    predictor = Predictor.load("runs/sample/model")
    predictor.predict(["What a lovely day."])                      # every task that reads one text
    predictor.predict(["How old is it?"], ["What is its age?"])    # and those that read two

Each distinct text, and each distinct pair, goes through the encoder once, whatever number of heads it serves.
The object can be pickled, and used from several threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minbert.data.inputs import Inputs
from minbert.data.tokenizer import Tokenizer, Tokens
from minbert.delivery.backends import (
    BackendName,
    PooledEncoder,
    Precision,
    TorchEncoder,
    choose_backend,
    open_onnx,
    torch_precision,
)
from minbert.errors import MinbertError, suggest
from minbert.model.answers import Answers, Decision, decode
from minbert.model.encoder import Pooling
from minbert.model.multitask import MultitaskModel, answer_pooled, outputs_of
from minbert.model.saved import Manifest, load_model
from minbert.tasks import Task, View

Vectors = dict[Pooling, NDArray[np.float32]]


class Predictor:
    """A model with its tokenizer and the decisions that were chosen on dev.

    Args:
        model: the encoder and the heads.
        tokenizer: the encoder's.
        manifest: what the model's folder says of it.
        encoder: runs in the place of the model's own encoder, from the same weights.
    """

    def __init__(
        self, model: MultitaskModel, tokenizer: Tokenizer, manifest: Manifest, *, encoder: PooledEncoder | None = None
    ) -> None:
        self.model, self.tokenizer, self.manifest = model.eval(), tokenizer, manifest
        self.max_tokens = min(manifest.model.max_tokens, tokenizer.positions)
        self._encoder = encoder

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str = "cpu",
        precision: Precision = "fp32",
        backend: BackendName | None = None,
    ) -> Predictor:
        """From a model folder, such as RUN/model; for precision and backend see `Embedder.load`."""
        chosen = choose_backend(precision, backend, device)
        model, tokenizer, manifest = load_model(Path(folder), device="cpu" if chosen == "onnx" else device)
        if chosen == "onnx":
            return cls(model, tokenizer, manifest, encoder=open_onnx(Path(folder) / "encoder", precision))
        if precision != "fp32":
            model.use(torch_precision(precision, model.device))
        return cls(model, tokenizer, manifest)

    @property
    def encoder(self) -> PooledEncoder:
        """What turns tokens into sentence vectors, for the heads."""
        return self._encoder or TorchEncoder(self.model.runner)

    @property
    def tasks(self) -> dict[str, Task]:
        return dict(self.model.tasks)

    def predict(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, tasks: Iterable[str] | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """For each task a list of answers, in the order of the texts.

        Args:
            texts: the texts, or the first of each pair.
            pairs: the second of each pair.
            tasks: which; without it all that fit: those of one text and, where there are pairs, those of two.

        Returns:
            For a class `{"label": ..., "probability": ..., "probabilities": {...}}`, for a score `{"score": ...}`.
        """
        return {
            name: as_rows(self.model.tasks[name], answers)
            for name, answers in self.answers(texts, pairs, tasks).items()
        }

    def answers(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, tasks: Iterable[str] | None = None
    ) -> dict[str, Answers]:
        """The same as arrays."""
        outputs = self.outputs(texts, pairs, tasks)
        return {
            name: decode(self.model.tasks[name], raw, self.manifest.decisions.get(name, Decision()))
            for name, raw in outputs.items()
        }

    def outputs(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, tasks: Iterable[str] | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """What the heads say, before any decision, (rows, outputs)."""
        chosen = self._choose(tasks, pairs is not None)
        first, second = _listed(texts, "texts"), _listed(() if pairs is None else pairs, "pairs")
        if pairs is not None and len(first) != len(second):
            raise MinbertError(f"{len(first)} texts and {len(second)} pairs; expected as many of each")
        if not first:
            return {task.name: np.empty((0, task.outputs), np.float32) for task in chosen}
        rows: dict[View, list[Any]] = {"first": first, "second": second}
        rows["joint"] = list(zip(first, second, strict=False))
        rows["reversed"] = list(zip(second, first, strict=False))
        vectors: dict[View, Vectors] = {}
        for group in (("first", "second"), ("joint", "reversed")):
            wanted: dict[View, set[Pooling]] = {}
            for task in chosen:
                for view in task.answer_views:
                    if view in group:
                        wanted.setdefault(view, set()).add(self.model.poolings[task.name])
            vectors |= self._encode({view: rows[view] for view in wanted}, set().union(*wanted.values()))
        return {
            task.name: answer_pooled(
                self.model, task.name, [vectors[view][self.model.poolings[task.name]] for view in task.answer_views]
            )
            for task in chosen
        }

    def outputs_of(self, inputs: Inputs) -> NDArray[np.float32]:
        """The same of a task's rows that are tokenized already, such as a split of dev; see `multitask.outputs_of`."""
        if inputs.masking is not None and self._encoder is not None:
            name = inputs.task.name
            raise MinbertError(f'the masked task "{name}" needs the tokens\' own vectors; expected precision fp32')
        return outputs_of(self.model, inputs, self.encoder.encode)

    def embed(self, texts: Sequence[str], *, pooling: Pooling | None = None) -> NDArray[np.float32]:
        """The encoder's vector of each text, (texts, width)."""
        how = pooling or self.manifest.model.pooling
        return self._encode({"first": _listed(texts, "texts")}, {how})["first"][how]

    def _encode(self, rows: Mapping[View, list[Any]], poolings: set[Pooling]) -> dict[View, Vectors]:
        """Vectors of each view's rows; rows that are equal, within a view or between them, are encoded once."""
        if not rows:
            return {}
        places: dict[Any, int] = {}
        index = {
            view: np.fromiter((places.setdefault(row, len(places)) for row in values), np.int64, len(values))
            for view, values in rows.items()
        }
        weights = self.manifest.model.pooling_weights if "weighted" in poolings else None
        vectors = self.encoder.encode(self._tokenize(list(places), weights), sorted(poolings))
        return {view: {how: table[where] for how, table in vectors.items()} for view, where in index.items()}

    def _tokenize(self, distinct: list[Any], weights: Mapping[str, float] | None = None) -> Tokens:
        if distinct and isinstance(distinct[0], tuple):
            first, second = zip(*distinct, strict=True)
            return self.tokenizer.encode(first, second, max_tokens=self.max_tokens, weights=weights)
        return self.tokenizer.encode(distinct, max_tokens=self.max_tokens, weights=weights)

    def _choose(self, tasks: Iterable[str] | None, paired: bool) -> list[Task]:
        known = self.model.tasks
        if tasks is None:
            answering = [task for task in known.values() if not task.is_masked]
            if not answering:
                raise MinbertError(nothing_to_predict(known))
            fitting = [task for task in answering if paired or not task.answers_pairs]
            if not fitting:
                raise MinbertError(f"every task of this model reads two texts: {', '.join(known)}; found one")
            return fitting
        chosen = []
        for name in tasks:
            if name not in known:
                raise MinbertError(f'no task "{name}"{suggest(name, known)}; this model has: {", ".join(known)}')
            if known[name].is_masked:
                raise MinbertError(nothing_to_predict([name]))
            if known[name].answers_pairs and not paired:
                raise MinbertError(f'the task "{name}" reads two texts; found one')
            chosen.append(known[name])
        return chosen


def nothing_to_predict(masked: Iterable[str]) -> str:
    """Why tasks that guess hidden tokens cannot be asked."""
    names = ", ".join(masked)
    return f"{names}: a masked task trains the encoder and has nothing to predict; expected another kind of task"


def _listed(values: Sequence[str], name: str) -> list[str]:
    if isinstance(values, str):  # whose letters would each be answered
        raise MinbertError(f"{name} is one string; expected a list of strings")
    return list(values)


def as_rows(task: Task, answers: Answers) -> list[dict[str, Any]]:
    """Answers as plain data, a dictionary a row."""
    if answers.probabilities is None:
        return [{"score": float(value)} for value in answers.predictions]
    rows = []
    for prediction, probabilities in zip(answers.predictions, answers.probabilities, strict=True):
        number = int(prediction)
        rows.append(
            {
                "label": task.classes[number],
                "probability": float(probabilities[number]),
                "probabilities": {name: float(value) for name, value in zip(task.classes, probabilities, strict=True)},
            }
        )
    return rows
