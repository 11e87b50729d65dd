"""Which words mattered: each word is left out in turn, and the change of the answer is its effect.

    found = word_effects(predictor, "A truly wonderful film.")["sst"]
    found.answer, found.value                                      # "very positive", 0.91
    [(word.text, word.effect) for word in found.words]             # ("wonderful", 0.58), ("film", -0.01), ...

A positive effect says that the word speaks for the answer: without it the probability of the answered class, or the
score, would be lower. All variants go through the predictor in one call, so that each is encoded once for all tasks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minbert.data.raw import normalise
from minbert.delivery.predictor import Ensemble, Predictor
from minbert.errors import MinbertError
from minbert.tasks import Task

LIMIT = 64
"""Words of a question that are left out in turn; each costs an encoding."""


@dataclass(frozen=True)
class Span:
    """A word in its place: `text` is what lies from `start` to `end` of the text, counted in characters."""

    text: str
    start: int
    end: int
    side: int = 0
    """Of a pair, which text it is in: 0 or 1."""


@dataclass(frozen=True)
class WordEffect(Span):
    """A word, and what it does to the answer."""

    effect: float = 0.0
    """The answer's probability, or its score, less what it is without the word."""


@dataclass(frozen=True)
class Importance:
    """One task's answer, and what its words did to it."""

    task: str
    answer: str
    """The class that was asked about, usually the answered one; empty for a score."""
    value: float
    """Its probability, or the score."""
    words: tuple[WordEffect, ...]
    """In the order of the text, of a pair the first text's before the second's."""
    skipped: int = 0
    """Words beyond the limit, about which nothing is known."""

    def strongest(self, count: int = 5) -> list[WordEffect]:
        """Words by the size of their effect, whatever its sign."""
        return sorted(self.words, key=lambda word: -abs(word.effect))[:count]


def word_effects(
    predictor: Predictor,
    text: str,
    second: str | None = None,
    *,
    tasks: Iterable[str] | None = None,
    label: str = "",
    masked: bool = False,
    limit: int = LIMIT,
) -> dict[str, Importance]:
    """What each word of a text, or of a pair, does to the answers.

    Args:
        predictor: the model.
        text: the text, or the first of a pair.
        second: the second of a pair.
        tasks: which; default those that read what is given, one text or two.
        label: a class to ask about instead of the answered one.
        masked: put the mask token in a word's place instead of nothing.
        limit: the most words, of a pair of both texts together; the rest is counted in `skipped`.
    """
    names = _fitting(predictor, paired=second is not None) if tasks is None else list(tasks)
    occlusion = occlude(text, second, limit=limit)
    filler = _mask_token(predictor) if masked else ""
    effects: dict[str, Importance] = {}
    for lower in (False, True):  # tasks that read normalised texts read others than the rest
        group = [name for name in names if name not in predictor.tasks or predictor.tasks[name].normalise == lower]
        group = [name for name in group if name not in effects]
        if not group:
            continue
        columns = occlusion.columns(filler, lower=lower)
        rows = predictor.predict(columns[0], columns[1] if second is not None else None, tasks=group)
        effects |= {name: occlusion.effects(predictor.tasks[name], rows[name], label) for name in group}
    return {name: effects[name] for name in names}


@dataclass(frozen=True)
class Occlusion:
    """A text, or a pair, and the words of it that are left out in turn."""

    texts: tuple[str, ...]
    words: tuple[Span, ...]
    skipped: tuple[int, ...]
    """Of each text, the words beyond the limit."""

    def columns(self, filler: str = "", *, lower: bool = False) -> list[list[str]]:
        """For each text what is to be asked: row 0 is the whole question, each other one lacks a word."""
        return [
            [
                _without(text, word if word and word.side == side else None, filler, lower)
                for word in (None, *self.words)
            ]
            for side, text in enumerate(self.texts)
        ]

    def effects(self, task: Task, rows: Sequence[Mapping[str, Any]], label: str = "") -> Importance:
        """What the answers to these rows, as `Predictor.predict` has them, say of each word."""
        answer = ""
        if task.is_classification:
            if label and label not in task.classes:
                raise MinbertError(f'{task.name} has no class "{label}"; expected one of: {", ".join(task.classes)}')
            answer = label or rows[0]["label"]
            values = [row["probabilities"][answer] for row in rows]
        else:
            values = [row["score"] for row in rows]
        sides = 2 if task.answers_pairs else 1  # a task that reads one text knows nothing of the second
        words = tuple(
            WordEffect(word.text, word.start, word.end, word.side, values[0] - value)
            for word, value in zip(self.words, values[1:], strict=True)
            if word.side < sides
        )
        return Importance(task.name, answer, values[0], words, sum(self.skipped[:sides]))


def occlude(text: str, second: str | None = None, *, limit: int = LIMIT) -> Occlusion:
    """Which words are left out; for the arguments see `word_effects`."""
    if limit < 1:
        raise MinbertError(f"limit is {limit}; expected one word or more")
    texts = (text,) if second is None else (text, second)
    spans = [split_words(one) for one in texts]
    kept = _within(spans, limit)
    chosen = tuple(Span(*place, side) for side, found in enumerate(spans) for place in found[: kept[side]])
    return Occlusion(texts, chosen, tuple(len(found) - count for found, count in zip(spans, kept, strict=True)))


def split_words(text: str) -> list[tuple[str, int, int]]:
    """Words with their places: what blanks separate, less the punctuation around it, which is a word of its own (an
    exclamation mark, or a face, may matter). Characters of scripts that have no blanks stand alone."""
    found: list[tuple[str, int, int]] = []
    for chunk in re.finditer(r"\S+", text):
        for start, end in _parts(chunk.group()):
            found.append((chunk.group()[start:end], chunk.start() + start, chunk.start() + end))
    return found


def _parts(chunk: str) -> Iterator[tuple[int, int]]:
    """Borders of the words of a chunk without blanks."""
    signs = [unicodedata.category(character)[0] in "PS" for character in chunk]
    start, end = 0, len(chunk)
    while start < end and signs[start]:
        start += 1
    while end > start and signs[end - 1]:
        end -= 1
    if start > 0:
        yield 0, start
    begin = start
    for place in range(start, end):
        if _stands_alone(chunk[place]):
            if begin < place:
                yield begin, place
            yield place, place + 1
            begin = place + 1
    if begin < end:
        yield begin, end
    if 0 < end < len(chunk) and start < end:
        yield end, len(chunk)


def _stands_alone(character: str) -> bool:
    """Chinese characters and Japanese syllables, between which there are no blanks."""
    code = ord(character)
    return 0x3040 <= code <= 0x30FF or 0x3400 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or 0x20000 <= code < 0x30000


def _within(spans: Sequence[Sequence[Any]], limit: int) -> list[int]:
    """How many words of each text are kept; what one text does not use is the other's."""
    if len(spans) == 1:
        return [min(len(spans[0]), limit)]
    first, second = (len(found) for found in spans)
    half = limit // 2
    kept = min(first, max(limit - half, limit - second))
    return [kept, min(second, limit - kept)]


def _without(text: str, span: Span | None, filler: str, lower: bool) -> str:
    """The text less a word; a blank between what is left, so that its neighbours do not become one."""
    parts = [text] if span is None else [text[: span.start], filler, text[span.end :]]
    read = [part if part == filler else normalise(part) if lower else part.strip() for part in parts]
    return " ".join(part for part in read if part)


def _fitting(predictor: Predictor, *, paired: bool) -> list[str]:
    """Of a pair the tasks that compare; an error of the predictor's where there are none."""
    fitting = [task.name for task in predictor.tasks.values() if not task.is_masked and task.answers_pairs == paired]
    if not fitting:
        wanted, found = ("two texts", "two") if paired else ("one text", "one")
        raise MinbertError(f"no task of this model reads {wanted}: {', '.join(predictor.tasks)}; found {found}")
    return fitting


def _mask_token(predictor: Predictor) -> str:
    tokens = {predictor.tokenizer.mask_token}
    if isinstance(predictor, Ensemble):
        tokens |= {member.tokenizer.mask_token for member in predictor.members}
    if len(tokens) > 1:
        raise MinbertError(
            f"the members of this ensemble mask by {' and '.join(sorted(tokens))}; expected masked=False"
        )
    return tokens.pop()
