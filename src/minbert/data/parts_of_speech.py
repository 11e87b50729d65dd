"""What part of speech each word of an English sentence is: for pooling that weighs verbs above auxiliaries.

    parts_of(["He", "doesn", "'", "t", "eat", "fish", "."])
    # function, auxiliary, other, adverb, verb, noun, other

TextBlob tags the words (extra "pos"): Brill's rules and a lexicon, all inside its package, nothing to download. Its tags
do not tell "has eaten" from "has a car", so auxiliaries are found here: every form of be, the copula included; modal
verbs; have before a participle, or before to; do before not, or with another verb after it. Words come as BERT's
pre-tokenizer cuts them, contractions in three.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, get_args

from minbert.errors import require
from minbert.tasks import PartOfSpeech

FEATURE = 'pooling "weighted"'
RULES = 1  # of this file; another number is another entry of the token cache
PARTS: tuple[PartOfSpeech, ...] = get_args(PartOfSpeech)
OF_TAG: dict[str, PartOfSpeech] = {  # by the start of a tag of the Penn Treebank
    "MD": "auxiliary",
    "VB": "verb",
    "NN": "noun",
    "JJ": "adjective",
    "RB": "adverb",
    "CC": "function",
    "DT": "function",
    "EX": "function",
    "IN": "function",
    "PDT": "function",
    "POS": "function",
    "PRP": "function",
    "RP": "function",
    "TO": "function",
    "W": "function",  # which, who, whose, when
}
BE = frozenset(["be", "am", "is", "are", "was", "were", "been", "being"])
HAVE = frozenset(["have", "has", "had", "having"])
DO = frozenset(["do", "does", "did"])
STEMS = (
    *("do", "does", "did", "is", "are", "was", "were", "have", "has", "had"),
    *("would", "could", "should", "must", "might", "need"),
)
NEGATED = {  # don't, won't, can't: what stands before 't
    **{f"{stem}n": stem for stem in STEMS},
    **{"won": "will", "can": "can", "shan": "shall", "ain": "is"},
}
SHORT = {"re": "are", "ll": "will", "ve": "have", "d": "would", "m": "am"}  # what stands after the apostrophe
BEFORE_IS = frozenset(  # after these 's is no genitive
    ("it", "he", "she", "that", "this", "what", "who", "where", "when", "how", "why", "there", "here", "let")
)
APOSTROPHES = ("'", "\u2019")
REACH = 6  # words from do to its verb, at most


def parts_of(words: Sequence[str]) -> list[PartOfSpeech]:
    """A part of speech for each word; "other" for punctuation, numbers and whatever else."""
    said = _spelled_out(words)
    places = [place for place, word in enumerate(said) if word]
    tagged = [(said[place], tag) for place, tag in zip(places, _tags([said[place] for place in places]), strict=True)]
    found: list[PartOfSpeech] = ["other"] * len(words)
    for number, (word, tag) in enumerate(tagged):
        part: PartOfSpeech = next((part for start, part in OF_TAG.items() if tag.startswith(start)), "other")
        if word.lower() in BE or (part == "verb" and _helps(word.lower(), tagged[number + 1 :])):
            part = "auxiliary"
        found[places[number]] = part if any(map(str.isalpha, word)) else "other"
    return found


def _spelled_out(words: Sequence[str]) -> list[str]:
    """The words as a tagger knows them: does not, for the three pieces of doesn't. An apostrophe becomes empty."""
    said = list(words)
    for place in range(1, len(words) - 1):
        before, after = words[place - 1].lower(), words[place + 1].lower()
        if words[place] not in APOSTROPHES:
            continue
        if after == "t" and before in NEGATED:
            said[place - 1 : place + 2] = [NEGATED[before], "", "not"]
        elif after in SHORT:
            said[place : place + 2] = ["", SHORT[after]]
        elif after == "s":
            said[place : place + 2] = ["", "is" if before in BEFORE_IS else "'s"]
    return said


def _helps(word: str, after: Sequence[tuple[str, str]]) -> bool:
    """Is this form of have or do an auxiliary, by what comes after it?"""
    if word in HAVE:
        for other, tag in after:
            if tag.startswith("RB") or tag == "PRP":
                continue
            return tag in ("VBN", "VBD") or other.lower() in BE or tag == "TO"
    if word in DO:
        for other, tag in after[:REACH]:
            if other.lower() == "not" or tag in ("VB", "VBP"):
                return True
            if tag == "CC" or not tag[0].isalpha():
                break
    return False


def tagger() -> str:
    """What decides the parts of speech: other rules or another TextBlob may give others."""
    require("textblob", "pos", FEATURE)
    return f"rules {RULES}, textblob {version('textblob')}"


def _tags(words: Sequence[str]) -> list[str]:
    english: Any = require("textblob.en", "pos", FEATURE)
    return (
        [tag for _, tag in english.parser.find_tags(["I" if word == "i" else word for word in words])] if words else []
    )
