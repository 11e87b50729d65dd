"""A tagger of a dozen words in the place of TextBlob's, for tests of where the weights go."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from minbert.data import cache, parts_of_speech

TAGS = {"the": "DT", "a": "DT", "and": "CC", "sat": "VBD", "ran": "VBD", "sang": "VBD", "is": "VBZ", "not": "RB"}
WEIGHTS = {"verb": 2.0, "auxiliary": 0.5, "function": 0.25, "noun": 1.5, "other": 0.75}


def tags(words: Sequence[str]) -> list[str]:
    """What is not known is a noun, or punctuation."""
    return [TAGS.get(word.lower(), "NN" if word.isalpha() else ".") for word in words]


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_of_speech, "_tags", tags)
    monkeypatch.setattr(cache, "tagger", lambda: "a dozen words")
