"""Parts of speech: against sentences tagged by hand where TextBlob is installed; the rules for auxiliaries alone."""

from __future__ import annotations

from collections import Counter

import pytest

from minbert.data import parts_of_speech
from minbert.data.parts_of_speech import PARTS, parts_of, tagger
from minbert.errors import MinbertError
from tests.tagged_sentences import gold


@pytest.mark.parity
def test_sentences_tagged_by_hand() -> None:
    """Measured with TextBlob 0.20.1: verb .91, auxiliary 1, noun .98, function .99."""
    right: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for words, parts in gold():
        for expected, found in zip(parts, parts_of(words), strict=True):
            every[expected] += 1
            right[expected] += expected == found
    assert len(gold()) == 60
    for part in ("verb", "auxiliary", "noun", "function"):
        assert right[part] / every[part] >= 0.9, part


TAGGED = {
    "he": "PRP", "they": "PRP", "you": "PRP", "has": "VBZ", "have": "VBP", "do": "VBP", "did": "VBD", "eaten": "VBN",
    "eat": "VB", "car": "NN", "dishes": "NNS", "a": "DT", "the": "DT", "to": "TO", "and": "CC", "never": "RB", "go": "VB",
    "not": "RB", "is": "VBZ", "will": "MD", "dog": "NN", "'s": "POS", "broken": "VBN", "leg": "NN", "old": "JJ",
}  # fmt: skip
LETTERS = {"V": "verb", "X": "auxiliary", "N": "noun", "J": "adjective", "A": "adverb", "F": "function", "O": "other"}


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("he has eaten", "F X V"),
        ("he has never eaten", "F X A V"),
        ("Have you eaten ?", "X F V O"),
        ("he has a broken leg", "F V F V N"),  # a participle, but not that of has
        ("they have to go", "F X F V"),
        ("do they eat ?", "X F V O"),
        ("did the old dog eat ?", "X F J N V O"),
        ("they do the dishes", "F V F N"),
        ("they do the dishes and eat", "F V F N F V"),  # the verb after "and" is none of do's
        ("they don ' t eat", "F X O A V"),
        ("he isn \u2019 t old", "F X O A J"),
        ("he won ' t go", "F X O A V"),
        ("they ' ve eaten", "F O X V"),
        ("he ' s eaten", "F O X V"),
        ("the dog ' s leg", "F N O F N"),
        ("42 ' !", "O O O"),
        ("", ""),
    ],
)
def test_auxiliaries_and_contractions(sentence: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        parts_of_speech,
        "_tags",
        lambda words: [TAGGED.get(word.lower(), "NN" if word.isalpha() else ".") for word in words],
    )
    assert parts_of(sentence.split()) == [LETTERS[letter] for letter in expected.split()]


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("textblob", "textblob.en"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (tagger, lambda: parts_of(["word"])):
        with pytest.raises(MinbertError, match=r"pooling \"weighted\" needs textblob.*minbert\[pos\]"):
            call()
    assert PARTS == ("verb", "auxiliary", "noun", "adjective", "adverb", "function", "other")
