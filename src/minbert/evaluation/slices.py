"""Where are the mistakes? Their share among the rows that have something in common, such as a negation.

    for part in slices(read_predictions(run, "quora").rows, classes=["different", "duplicate"]):
        print(part.by, part.group, part.rows, *part.rates)

The papers explain single mistakes: a negation was missed, most words were the same, one text was much longer, other numbers
stood in the same sentence, an abbreviation was not known (Hillebrand, section 6); what follows a "but" counts more, words of
degree decide (Vinjapuri & Vasireddy, section 6). Each of these is a rule here, so that all rows of a split can be asked.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from minbert.evaluation.diagnosis import Row, is_ordered, t_reach, wilson
from minbert.evaluation.overlap import words

NEGATIONS = "not, no, never, nothing, nobody, none, neither, nor, nowhere, without, cannot"
CONTRASTS = "but, yet, though, although, however, despite, while, whereas, instead"
DEGREES = "very, really, truly, extremely, completely, totally, utterly, absolutely, most, least, best, worst"
NEGATION, CONTRAST, DEGREE = (
    re.compile(rf"\b({listed.replace(', ', '|')})\b{besides}")
    for listed, besides in ((NEGATIONS, r"|n['\u2019]t\b"), (CONTRASTS, ""), (DEGREES, ""))
)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
RARE = 0.005  # of the texts: a word of more than these is no abbreviation, such as "was"
COMMON = ("under a quarter", "a quarter to a half", "half to three quarters", "three quarters or more")
FEW = 10  # rows: of fewer a rate says nothing about others like them
LENGTHS = ((1.25, "about the same"), (2.0, "up to twice as many"), (math.inf, "more than twice as many"))
RULES = {
    "words": "thirds of the rows, by the words of the text.",
    "a negation": f"one of: {NEGATIONS}; or what ends in n't.",
    "a contrast": f"one of: {CONTRASTS}.",
    "a word of degree": f"one of: {DEGREES}.",
    "words in common": "of the different words of both texts, the share that both have.",
    "words of the longer text": "against those of the shorter; about the same is at most a quarter more.",
    "numbers": "those of the two texts, in any order.",
    "initials for a name": "a word of one text, of three letters or more and in at most 0.5% of the texts, "
    "whose letters begin words in a row of the other.",
}
"""How rows are divided, in words."""


@dataclass(frozen=True)
class Rate:
    """A share of rows or a mean over them, with its 95% interval."""

    value: float
    low: float
    high: float
    rows: int
    """Of how many."""
    form: str
    """How to write it."""

    def __str__(self) -> str:
        return format(self.value, self.form) if self.rows else ""

    @property
    def interval(self) -> str:
        if self.rows < FEW:
            return "too few to say" if self.rows else ""
        return " to ".join(format(end, self.form) for end in (self.low, self.high))

    def differs(self, other: float) -> bool:
        """Does the other lie outside the interval? Of a few rows nobody knows."""
        return self.rows >= FEW and not self.low <= other <= self.high


@dataclass(frozen=True)
class Slice:
    """The rows of one group of a division."""

    by: str
    """What divides the rows."""
    group: str
    rows: int
    rates: Sequence[Rate]
    """Of the columns that `columns_of` names."""


def columns_of(classes: Sequence[str]) -> list[str]:
    """What is measured of each group: errors, and where they have a direction, each direction."""
    if not classes:
        return ["mean error", "mean size of the error"]
    if len(classes) == 2:
        return [
            "wrong",
            f"false positives, of all \u201c{classes[0]}\u201d",
            f"false negatives, of all \u201c{classes[1]}\u201d",
        ]
    return ["wrong", "too high", "too low"] if is_ordered(classes) else ["wrong"]


def slices(rows: Sequence[Row], classes: Sequence[str]) -> list[Slice]:
    """All rows together, then the groups of every division that tells rows apart."""
    rows = [row for row in rows if math.isfinite(row["prediction"] - row["label"])]
    if not rows:
        return []
    found = [Slice("all", "", len(rows), _rates(rows, classes))]
    for by, groups in _divisions(rows):
        filled = [(group, inside) for group, inside in groups if inside]
        if len(filled) > 1:
            found += [Slice(by, group, len(inside), _rates(inside, classes)) for group, inside in filled]
    return found


Groups = list[tuple[str, list[Row]]]


def _divisions(rows: Sequence[Row]) -> Iterator[tuple[str, Groups]]:
    if "text2" not in rows[0]:
        yield "words", _by_length(rows)
        for by, pattern in (("a negation", NEGATION), ("a contrast", CONTRAST), ("a word of degree", DEGREE)):
            yield by, _grouped(rows, partial(_matches, pattern), ("no", "yes"))
        return
    yield "words in common", _grouped(rows, _common, COMMON)
    yield "words of the longer text", _grouped(rows, _uneven, [name for _, name in LENGTHS])
    yield "a negation", _grouped(rows, _negations, ("in no text", "in one text", "in both texts"))
    yield "numbers", _grouped(rows, _numbers, ("none", "the same", "others"))
    yield "initials for a name", _by_initials(rows)


def _grouped(rows: Sequence[Row], which: Callable[[Row], int], names: Sequence[str]) -> Groups:
    groups: Groups = [(name, []) for name in names]
    for row in rows:
        groups[which(row)][1].append(row)
    return groups


def _by_length(rows: Sequence[Row]) -> Groups:
    """Thirds of the rows."""
    lengths = [len(_plain_words(row["text"])) for row in rows]
    first, second = (int(edge) for edge in np.quantile(lengths, (1 / 3, 2 / 3)))
    names = (f"up to {first}", f"{first + 1} to {second}", f"more than {second}")
    groups: Groups = [(name, []) for name in names]
    for row, length in zip(rows, lengths, strict=True):
        groups[(length > first) + (length > second)][1].append(row)
    return groups


def _plain_words(text: str) -> list[str]:
    return [word for word in words(text) if word[0].isalnum()]


def _matches(pattern: re.Pattern[str], row: Row, key: str = "text") -> bool:
    return pattern.search(row[key].lower()) is not None


def _common(row: Row) -> int:
    """Of the words of both texts, which quarter is in both."""
    first, second = (set(_plain_words(row[key])) for key in ("text", "text2"))
    share = len(first & second) / max(1, len(first | second))
    return min(3, int(share * 4))


def _uneven(row: Row) -> int:
    shorter, longer = sorted(len(_plain_words(row[key])) for key in ("text", "text2"))
    ratio = longer / max(1, shorter)
    return next(place for place, (most, _) in enumerate(LENGTHS) if ratio <= most)


def _negations(row: Row) -> int:
    return _matches(NEGATION, row) + _matches(NEGATION, row, "text2")


def _numbers(row: Row) -> int:
    first, second = (sorted(NUMBER.findall(row[key])) for key in ("text", "text2"))
    return 0 if not first and not second else 1 if first == second else 2


def _by_initials(rows: Sequence[Row]) -> Groups:
    texts = Counter(word for row in rows for key in ("text", "text2") for word in set(_plain_words(row[key])))
    usual = {word for word, count in texts.items() if count > max(1, RARE * 2 * len(rows))}
    return _grouped(rows, lambda row: int(has_initials(row["text"], row["text2"], usual)), ("no", "yes"))


def has_initials(first: str, second: str, usual: Collection[str] = ()) -> bool:
    """Has one text a word of three letters or more that the other spells as words in a row: BoE, Bank of England?"""
    for short, spelled in ((first, second), (second, first)):
        names = _plain_words(spelled)
        initials = "".join(name[0] for name in names)
        for word in set(_plain_words(short)).difference(names, usual):
            if len(word) > 2 and word.isalpha() and word in initials:
                return True
    return False


def _rates(rows: Sequence[Row], classes: Sequence[str]) -> list[Rate]:
    errors = np.array([row["prediction"] - row["label"] for row in rows])
    if not classes:
        return [_mean(errors, "+.2f"), _mean(np.abs(errors), ".2f", least=0.0)]
    wrong, high, low = errors != 0, errors > 0, errors < 0
    if len(classes) == 2:
        positive = np.array([row["label"] for row in rows]) == 1
        return [_share(wrong), _share(high[~positive]), _share(low[positive])]
    return [_share(part) for part in ((wrong, high, low) if is_ordered(classes) else (wrong,))]


def _share(those: NDArray[np.bool_]) -> Rate:
    if not len(those):
        return Rate(0.0, 0.0, 0.0, 0, ".1%")
    share = float(those.mean())
    return Rate(share, *wilson(share, len(those)), len(those), ".1%")


def _mean(values: NDArray[np.float64], form: str, least: float = -math.inf) -> Rate:
    """Of values that cannot be below the least."""
    mean, reach = float(values.mean()), t_reach(values)
    return Rate(mean, max(least, mean - reach), mean + reach, len(values), form)
