"""What several callers ask, answered together: each distinct text, and each distinct pair, is encoded once for all.

replies = answer(predictor, [Question(texts=("Good.",), tasks=("sst",)), Question(texts=("Good.",), embed=True)])
replies[0].answers["sst"], replies[1].vectors            # one encoding served both
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minbert.data.raw import normalise
from minbert.delivery.predictor import Predictor, Reader, Rows, as_rows, nothing_to_predict
from minbert.errors import MinbertError, suggest
from minbert.model.answers import Decision, decode


@dataclass(frozen=True)
class Question:
    """What one caller asks. Each task answers for the rows that it reads: texts, or pairs."""

    texts: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    tasks: tuple[str, ...] = ()
    """Tasks that the model has and that read what is there: see `choose_tasks`."""
    embed: bool = False
    """Also the encoder's vector of each text."""

    def rows(self, predictor: Predictor, task: str) -> Rows:
        """What a task reads of it, normalised where the task is."""
        about = predictor.tasks[task]
        first, second = (
            (zip(*self.pairs, strict=True) if self.pairs else ((), ())) if about.answers_pairs else (self.texts, ())
        )
        if about.normalise:
            return Rows([normalise(text) for text in first], [normalise(text) for text in second])
        return Rows(first, second)

    def inputs(self, predictor: Predictor) -> set[Any]:
        """What must be encoded for it: its price."""
        found: set[Any] = set().union(*(predictor.inputs_of(task, self.rows(predictor, task)) for task in self.tasks))
        return found | set(self.texts) if self.embed else found


@dataclass(frozen=True, eq=False)
class Reply:
    """The answers to one question, the same whatever else was asked at the time."""

    answers: dict[str, list[dict[str, Any]]]
    """By task, one for each of the texts or of the pairs; see `Predictor.predict`."""
    vectors: NDArray[np.float32] | None
    """(texts, width)"""
    encodings: int
    """Distinct texts and pairs that the encoder read for it."""
    tokens: int
    """Of these."""
    cut_texts: tuple[int, ...]
    """Numbers of the texts that were longer than the encoder reads."""
    cut_pairs: tuple[int, ...]


def choose_tasks(predictor: Predictor, wanted: Iterable[str] | None, *, texts: bool, pairs: bool) -> tuple[str, ...]:
    """The tasks asked for, or all that fit; an error where one has nothing to read, or some rows are not asked about."""
    known = {name: task for name, task in predictor.tasks.items() if not task.is_masked}
    here = "texts and pairs" if texts and pairs else "pairs" if pairs else "texts"
    if wanted is None:
        chosen = [name for name, task in known.items() if (pairs if task.answers_pairs else texts)]
    else:
        chosen = list(dict.fromkeys(wanted))
        for name in chosen:
            if name not in predictor.tasks:
                raise MinbertError(f'no task "{name}"{suggest(name, known)}; this model has: {", ".join(known)}')
            if name not in known:
                raise MinbertError(nothing_to_predict([name]))
            if not (pairs if known[name].answers_pairs else texts):
                reads = "pairs" if known[name].answers_pairs else "texts"
                raise MinbertError(f'the task "{name}" reads {reads}; found {here}')
    for there, reads, paired in ((texts, "texts", False), (pairs, "pairs", True)):
        if there and not any(known[name].answers_pairs is paired for name in chosen):
            raise MinbertError(f"no task that reads {reads} was asked for; this model has: {', '.join(known)}")
    return tuple(chosen)


class _Batch:
    """Some questions, and where the rows of each lie among those of all."""

    def __init__(self, predictor: Predictor, questions: Sequence[Question]) -> None:
        self.predictor, self.questions = predictor, questions
        self.reader = Reader(predictor._tokenize)

    def run(self) -> list[Reply]:
        predictor, asked, spans = self.predictor, {}, {}
        for name in dict.fromkeys(name for question in self.questions for name in question.tasks):
            first: list[str] = []
            second: list[str] = []
            for number, question in enumerate(self.questions):
                if name in question.tasks:
                    rows = question.rows(predictor, name)
                    spans[number, name] = slice(len(first), len(first) + len(rows.first))
                    first += rows.first
                    second += rows.second
            asked[name] = Rows(first, second)
        embed = [text for question in self.questions if question.embed for text in question.texts]
        outputs, vectors = predictor.run(asked, self.reader, embed)
        answers = {
            name: as_rows(
                predictor.tasks[name],
                decode(predictor.tasks[name], raw, predictor.manifest.decisions.get(name, Decision())),
            )
            for name, raw in outputs.items()
        }
        replies, done = [], 0
        for number, question in enumerate(self.questions):
            own = None
            if question.embed and vectors is not None:
                own, done = vectors[done : done + len(question.texts)], done + len(question.texts)
            replies.append(
                self._reply(question, {name: answers[name][spans[number, name]] for name in question.tasks}, own)
            )
        return replies

    def _reply(
        self, question: Question, answers: dict[str, list[dict[str, Any]]], vectors: NDArray[np.float32] | None
    ) -> Reply:
        inputs = question.inputs(self.predictor)
        # Of an ensemble each is (member, row); what the first member's tokenizer read is what is told.
        rows = {row[1] if isinstance(row[0], int) else row for row in inputs if row}
        tokens = sum(self._lengths[self.reader.places[row]] for row in rows if row in self.reader.places)
        cut = rows & self._cut
        cut_texts = tuple(i for i, text in enumerate(question.texts) if cut and _ways(text) & cut)
        cut_pairs = tuple(i for i, pair in enumerate(question.pairs) if cut and _ways(*pair) & cut)
        return Reply(answers, vectors, len(inputs), tokens, cut_texts, cut_pairs)

    @cached_property
    def _lengths(self) -> list[int]:
        return self.reader.tokens.lengths.tolist()

    @cached_property
    def _cut(self) -> set[Any]:
        """The rows that were cut: of those that are as long as they may be, those that would be longer."""
        if not self.reader.tokens.truncation.texts:
            return set()
        limit, count = max(self._lengths), self.predictor.tokenizer.count
        full: list[Any] = [row for row, place in self.reader.places.items() if self._lengths[place] == limit]
        singles, pairs = [row for row in full if isinstance(row, str)], [row for row in full if isinstance(row, tuple)]
        counts = [*count(singles), *count([one for one, _ in pairs], [other for _, other in pairs])]
        return {row for row, tokens in zip([*singles, *pairs], counts, strict=True) if tokens > limit}


def _ways(*texts: str) -> set[Any]:
    """A text, or two, in every way that the encoder may read them."""
    plain = [texts, tuple(map(normalise, texts))]
    found: list[Any] = [one for row in plain for one in (*row, row, row[::-1])]
    return set(found)


def answer(predictor: Predictor, questions: Sequence[Question]) -> list[Reply]:
    """Every question's answers, in order."""
    return _Batch(predictor, questions).run()
