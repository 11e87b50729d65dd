"""The embedded abbreviations: each once, on one side of the split, and mostly made of the initials of what they stand for."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from minbert.data.raw import read_rows, read_split, resolve
from minbert.errors import MinbertError
from minbert.task_checks import check_task
from minbert.tasks import Task

SPLITS = ("train", "dev")


def pairs(split: str) -> list[tuple[str, str]]:
    path = Path(str(files("minbert"))) / "data" / "sample" / f"abbreviations-{split}.tsv"
    return [(row["short"], row["full"]) for _, row in read_rows(path)]


def spelt_by(short: str, full: str) -> bool:
    """Are the letters those that the words begin with, in order, some words left out?"""
    initials = iter("".join(word[0] for word in re.findall(r"[^\W_]+", full.lower())))
    return all(letter in initials for letter in re.findall(r"[a-z0-9]", short.split()[0].lower()))


def test_there_are_enough_and_none_twice() -> None:
    train, dev = (pairs(split) for split in SPLITS)
    assert len(train) > 240 and len(dev) > 60
    for column in (0, 1):
        found = [pair[column] for pair in train + dev]
        assert len({text.lower() for text in found}) == len(found)
        assert all(text and text == text.strip() for text in found)


def test_initials_mostly_match() -> None:
    found = [spelt_by(*pair) for split in SPLITS for pair in pairs(split)]
    assert sum(found) / len(found) > 0.85
    assert spelt_by("OECD", "Organisation for Economic Co-operation and Development")
    assert not spelt_by("UTC", "Coordinated Universal Time")
    assert all(len(full) > len(short) for split in SPLITS for short, full in pairs(split))


def test_a_task_reads_them_wherever_its_data_is(tmp_path: Path) -> None:
    (tmp_path / "own.tsv").write_text("short\tfull\tlabel\nBoE\tBank of England\t5\n")
    names = ("own.tsv", "embedded/abbreviations-dev.tsv", "none.tsv|embedded/abbreviations-train.tsv")
    assert [path.name for path in resolve(names, tmp_path)][1:] == ["abbreviations-dev.tsv", "abbreviations-train.tsv"]
    task = Task("short", "pair-regression", test=names[1:], text="short", text2="full")
    found = read_split(check_task(task), "test", tmp_path)
    assert len(found) == len(pairs("dev")) + len(pairs("train")) and "BoE" in found.texts
    with pytest.raises(MinbertError, match="no file"):
        resolve(["embedded/nothing.tsv"], tmp_path)
