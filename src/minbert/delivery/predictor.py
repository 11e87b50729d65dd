"""The one way to run a trained model.

    predictor = Predictor.load("runs/sample/model")
    predictor.predict(["What a lovely day."])                      # every task that reads one text
    predictor.predict(["How old is it?"], ["What is its age?"])    # and those that read two

Each distinct text, and each distinct pair, goes through the encoder once, whatever number of heads it serves.
The object can be pickled, and used from several threads. Of a folder that holds an ensemble it is an `Ensemble`, whose
answers are the mean of its members'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from minbert.data.inputs import Inputs, tokenize
from minbert.data.raw import Examples
from minbert.data.tokenizer import Tokenizer, Tokens
from minbert.delivery.backends import Backend, BackendName, Precision, Vectors, choose_backend
from minbert.delivery.exported import is_export, open_export
from minbert.errors import MinbertError, require, suggest
from minbert.model.answers import Answers, Decision, decode, mean_outputs
from minbert.model.manifest import Manifest, check_members, read_manifest
from minbert.tasks import Task, View

if TYPE_CHECKING:
    from minbert.model.encoder import Pooling
    from minbert.model.multitask import MultitaskModel

Key = TypeVar("Key")


class Predictor:
    """A model with its tokenizer and the decisions that were chosen on dev.

    Args:
        model: the encoder and the heads: torch's, or a backend that runs them.
        tokenizer: the encoder's.
        manifest: what the model's folder says of it.
    """

    def __init__(self, model: MultitaskModel | Backend, tokenizer: Tokenizer, manifest: Manifest) -> None:
        self.backend: Backend = model if isinstance(model, Backend) else _in_torch(model)
        self.tokenizer, self.manifest = tokenizer, manifest
        self.tasks: dict[str, Task] = {task.name: task for task in manifest.tasks}
        self.poolings: dict[str, Pooling] = manifest.poolings
        self.max_tokens = min(manifest.model.max_tokens, tokenizer.positions)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str = "cpu",
        precision: Precision = "fp32",
        backend: BackendName | None = None,
    ) -> Predictor:
        """From a model folder, such as RUN/model, or one that `minbert export --to onnx` wrote, which needs no torch.

        Args:
            folder: which.
            device: "cpu", "cuda", "cuda:N" or "auto", a GPU where there is one.
            precision: see `Embedder.load`; an export has one precision, and runs in that.
            backend: likewise.
        """
        place = Path(folder)
        if is_export(place):
            return cls(*open_export(place, device=device, precision=precision, backend=backend))
        chosen = choose_backend(precision, backend, device)
        about = read_manifest(place)
        if about.members:
            members = (place / name for name in about.members)
            return Ensemble(
                [Predictor.load(one, device=device, precision=precision, backend=backend) for one in members], about
            )
        for module in ("torch", "safetensors"):
            require(module, "train", "a model that is not exported to onnx")
        from minbert.delivery.torch_backend import open_model

        return cls(*open_model(place, chosen, precision, device))

    @property
    def model(self) -> MultitaskModel:
        """Torch's model; an export has none."""
        found: MultitaskModel | None = getattr(self.backend, "model", None)
        if found is None:
            raise MinbertError("an export holds no torch model; expected the model folder that it was made of")
        return found

    def use_threads(self, threads: int) -> None:
        """Use at most that many cores."""
        self.backend.use_threads(threads)

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
        return {name: as_rows(self.tasks[name], answers) for name, answers in self.answers(texts, pairs, tasks).items()}

    def answers(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, tasks: Iterable[str] | None = None
    ) -> dict[str, Answers]:
        """The same as arrays."""
        outputs = self.outputs(texts, pairs, tasks)
        return {
            name: decode(self.tasks[name], raw, self.manifest.decisions.get(name, Decision()))
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
        rows = Rows(first, second)
        return self.run({task.name: rows for task in chosen}, Reader(self._tokenize))[0]

    def run(
        self, asked: Mapping[str, Rows], read: Reader, embed: Sequence[str] = ()
    ) -> tuple[dict[str, NDArray[np.float32]], NDArray[np.float32] | None]:
        """What the heads say, each task of rows of its own, at least one; and the vectors of `embed`, None of none.

        Every distinct text of all of them is encoded once, and so is every distinct pair.
        """
        tasks = {name: self.tasks[name] for name in asked}
        places = {name: [(id(asked[name]), view) for view in task.answer_views] for name, task in tasks.items()}
        vectors: dict[tuple[int, View], Vectors] = {}
        for group in (("first", "second"), ("joint", "reversed")):  # single texts, pairs
            rows: dict[tuple[int, View], Sequence[Any]] = {}
            poolings: set[Pooling] = set()
            for name in tasks:
                for place in places[name]:
                    if place[1] in group:
                        rows[place] = asked[name].view(place[1])
                        poolings.add(self.poolings[name])
            if embed and "first" in group:
                rows[0, "first"] = embed
                poolings.add(self.manifest.model.pooling)
            vectors |= self._encode(rows, poolings, read)
        outputs = self.backend.answer(
            {name: [vectors[place][self.poolings[name]] for place in places[name]] for name in tasks}
        )
        return outputs, vectors[0, "first"][self.manifest.model.pooling] if embed else None

    def inputs_of(self, task: str, rows: Rows) -> set[Any]:
        """What the encoder must read for a task's answers: texts, and pairs as tuples. Each costs an encoding."""
        return {row for view in self.tasks[task].answer_views for row in rows.view(view)}

    def outputs_of(self, inputs: Inputs, examples: Examples | None = None) -> NDArray[np.float32]:  # noqa: ARG002
        """The same of a task's rows that are tokenized already, such as a split of dev, see `multitask.outputs_of`;
        `examples` are the rows as texts, for a member of an ensemble that tokenizes them otherwise."""
        return self.backend.outputs_of(inputs)

    def embed(self, texts: Sequence[str], *, pooling: Pooling | None = None) -> NDArray[np.float32]:
        """The encoder's vector of each text, (texts, width)."""
        how = pooling or self.manifest.model.pooling
        read = Reader(self._tokenize)
        return self._encode({"first": _listed(texts, "texts")}, {how}, read)["first"][how]

    def _encode(self, rows: Mapping[Key, Sequence[Any]], poolings: set[Pooling], read: Reader) -> dict[Key, Vectors]:
        """Vectors of several lists of rows; rows that are equal, within a list or between them, are encoded once."""
        if not rows:
            return {}
        places: dict[Any, int] = {}
        index = {
            key: np.fromiter((places.setdefault(row, len(places)) for row in values), np.int64, len(values))
            for key, values in rows.items()
        }
        vectors = self.backend.encode(read(list(places)), sorted(poolings))
        return {key: {how: table[where] for how, table in vectors.items()} for key, where in index.items()}

    @property
    def pooling_weights(self) -> Mapping[str, float] | None:
        """By part of speech, where a task pools with them."""
        return self.manifest.model.pooling_weights if "weighted" in self.poolings.values() else None

    def _tokenize(self, distinct: list[Any]) -> Tokens:
        weights = self.pooling_weights
        if distinct and isinstance(distinct[0], tuple):
            first, second = zip(*distinct, strict=True)
            return self.tokenizer.encode(first, second, max_tokens=self.max_tokens, weights=weights)
        return self.tokenizer.encode(distinct, max_tokens=self.max_tokens, weights=weights)

    def _choose(self, tasks: Iterable[str] | None, paired: bool) -> list[Task]:
        known = self.tasks
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


class Ensemble(Predictor):
    """Several models with the same tasks: a task's answer is the mean of theirs, their probabilities' or their scores'.

    The decisions are the ensemble's own, those of its members are not used. The members, all of them in memory, run
    one after the other; each distinct text is tokenized once for every tokenizer and limit that they have.

    Args:
        members: one or more; the tasks, and the form of the outputs, are the first one's.
        manifest: what the ensemble's folder says of it.
    """

    def __init__(self, members: Sequence[Predictor], manifest: Manifest) -> None:
        check_members([member.manifest for member in members])
        first = members[0]
        super().__init__(first.backend, first.tokenizer, manifest)
        self.tasks, self.poolings = first.tasks, first.poolings
        self.members = tuple(members)
        rules = [(member.tokenizer.rules, member.max_tokens, member.pooling_weights) for member in members]
        self._alike = [rules.index(own) for own in rules]  # the first member that reads as each of them does

    def run(
        self, asked: Mapping[str, Rows], read: Reader, embed: Sequence[str] = ()
    ) -> tuple[dict[str, NDArray[np.float32]], NDArray[np.float32] | None]:
        if embed:
            self.embed(embed)
        readers = {number: Reader(self.members[number]._tokenize) for number in set(self._alike)} | {0: read}
        found = [
            member.run(asked, readers[number])[0] for member, number in zip(self.members, self._alike, strict=True)
        ]
        return {name: self._mean(name, [outputs[name] for outputs in found]) for name in asked}, None

    def use_threads(self, threads: int) -> None:
        for member in self.members:
            member.use_threads(threads)

    def inputs_of(self, task: str, rows: Rows) -> set[Any]:
        return {(number, row) for number, one in enumerate(self.members) for row in one.inputs_of(task, rows)}

    def _tokenize(self, distinct: list[Any]) -> Tokens:
        return self.members[0]._tokenize(distinct)

    def outputs_of(self, inputs: Inputs, examples: Examples | None = None) -> NDArray[np.float32]:
        name = inputs.task.name
        sets = {(0, inputs.task.views): inputs}  # which are tokenized as the first member reads them
        found = []
        for member, number in zip(self.members, self._alike, strict=True):
            task = member.tasks[name]
            if (number, task.views) not in sets:
                if examples is None:
                    raise MinbertError(f"the members of this ensemble read {name} in several ways; expected its texts")
                sets[number, task.views] = tokenize(
                    task, examples, member.tokenizer, member.max_tokens, weights=member.pooling_weights
                )
            found.append(member.outputs_of(sets[number, task.views]))
        return self._mean(name, found)

    def embed(self, texts: Sequence[str], *, pooling: Pooling | None = None) -> NDArray[np.float32]:  # noqa: ARG002
        """An error: vectors of different encoders lie in different spaces, where their mean says nothing."""
        raise MinbertError(
            f"an ensemble of {len(self.members)} models has no single embedding; expected one of its members"
        )

    def _mean(self, name: str, outputs: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        return mean_outputs(self.tasks[name], [member.tasks[name] for member in self.members], outputs)


class Rows:
    """The texts that a task is asked of: one a row, or two."""

    def __init__(self, first: Sequence[str], second: Sequence[str] = ()) -> None:
        self.first, self.second = first, second

    def view(self, view: View) -> Sequence[Any]:
        if view in ("joint", "reversed"):
            one, other = (self.first, self.second) if view == "joint" else (self.second, self.first)
            return list(zip(one, other, strict=True))
        return self.first if view == "first" else self.second


class Reader:
    """Tokenizes what it has not seen yet, and remembers it for as long as a question lasts."""

    def __init__(self, tokenize: Callable[[list[Any]], Tokens]) -> None:
        self._tokenize, self.tokens = tokenize, Tokens.join(())
        self.places: dict[Any, int] = {}
        """Each row's number among the tokens."""

    def __call__(self, distinct: list[Any]) -> Tokens:
        """The tokens of distinct texts, or of distinct pairs."""
        new = [row for row in distinct if row not in self.places]
        if new:
            self.places |= {row: len(self.tokens) + number for number, row in enumerate(new)}
            found = self._tokenize(new)
            self.tokens = Tokens.join([self.tokens, found]) if len(self.tokens) else found
            if len(new) == len(distinct):
                return found
        return self.tokens.take([self.places[row] for row in distinct])


def _in_torch(model: MultitaskModel) -> Backend:
    from minbert.delivery.torch_backend import TorchBackend

    return TorchBackend(model)


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
