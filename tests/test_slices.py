"""Where the mistakes are: what divides the rows, and the rates of each group, worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minbert.evaluation.diagnosis import wilson
from minbert.evaluation.mistakes import read_mistakes, tables, write_mistakes
from minbert.evaluation.slices import RULES, Slice, columns_of, has_initials, slices
from minbert.tasks import FIVE
from tests.made_up_runs import make_run

TWO = ("different", "duplicate")


def single(text: str, label: int, prediction: int) -> dict[str, Any]:
    return {"text": text, "label": float(label), "prediction": float(prediction)}


def pair(text: str, text2: str, label: float, prediction: float) -> dict[str, Any]:
    return {"text": text, "text2": text2, "label": label, "prediction": prediction}


def by_name(found: list[Slice]) -> dict[tuple[str, str], Slice]:
    return {(part.by, part.group): part for part in found}


def test_single_texts_by_negation_contrast_degree_and_length() -> None:
    rows = [
        single("I don't like it.", 0, 3),
        single("It was not\u2014and never will be\u2014my thing.", 1, 1),
        single("Isn\u2019t it grand?", 4, 0),
        single("Nice, but far too long for a Sunday evening with the whole family.", 1, 2),
        single("The very best of them.", 4, 4),
        single("Knotted notes, utmost care.", 3, 3),  # none of the words, though parts of others spell them
    ]
    found = by_name(slices(rows, FIVE))
    assert columns_of(FIVE) == ["wrong", "too high", "too low"]
    assert [rate.value for rate in found["all", ""].rates] == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    negated = found["a negation", "yes"]
    assert negated.rows == 3 and [rate.value for rate in negated.rates] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert (negated.rates[0].low, negated.rates[0].high) == wilson(2 / 3, 3)
    assert found["a negation", "no"].rows == 3
    assert found["a contrast", "yes"].rows == 1 and found["a contrast", "yes"].rates[1].value == 1
    assert found["a word of degree", "yes"].rows == 1 and found["a word of degree", "yes"].rates[0].value == 0
    words = [part for part in found.values() if part.by == "words"]
    assert sum(part.rows for part in words) == 6 and words[0].group.startswith("up to ")


def test_false_positives_are_of_the_negatives_and_false_negatives_of_the_positives() -> None:
    rows = [
        pair("how do i open a red door", "how do i close a red door", 0, 1),
        pair("how do i open a red door", "how do i paint a red door", 0, 0),
        pair("how do i open a red door", "how do i open a red door now", 1, 1),
        pair("which course is best", "where can i learn to cook", 1, 0),
        pair("which course is best", "why is the sky blue", 0, 0),
    ]
    found = by_name(slices(rows, TWO))
    assert columns_of(TWO)[1:] == [
        "false positives, of all \u201cdifferent\u201d",
        "false negatives, of all \u201cduplicate\u201d",
    ]
    assert [rate.value for rate in found["all", ""].rates] == pytest.approx([2 / 5, 1 / 3, 1 / 2])
    alike = found["words in common", "three quarters or more"]  # 6 of 8 words twice, 7 of 8 once
    assert alike.rows == 3 and [rate.value for rate in alike.rates] == pytest.approx([1 / 3, 1 / 2, 0])
    apart = found["words in common", "under a quarter"]
    assert apart.rows == 2 and [str(rate) for rate in apart.rates] == ["50.0%", "0.0%", "100.0%"]
    assert ("numbers", "none") not in found and ("a negation", "in no text") not in found  # they tell no rows apart


def test_a_direction_without_rows_has_no_rate() -> None:
    rows = [pair("a b c d", "a b c d", 1, 1), pair("one two", "three four", 0, 0)]
    found = by_name(slices(rows, TWO))
    alike = found["words in common", "three quarters or more"]
    assert [str(rate) for rate in alike.rates] == ["0.0%", "", "0.0%"] and alike.rates[1].interval == ""
    assert not alike.rates[1].differs(0.9)


def test_scores_by_lengths_and_numbers() -> None:
    rows = [
        pair("Call 234 now", "Call 235 now", 1.0, 3.5),
        pair("It costs 3.50 or 2", "2 or 3.50 is what it costs", 4.0, 4.5),
        pair("A cat", "A cat that sleeps on a red sofa", 2.0, 1.0),
        pair("A cat sleeps", "A dog sleeps well", 2.0, 2.0),
    ]
    found = by_name(slices(rows, ()))
    assert [rate.value for rate in found["all", ""].rates] == pytest.approx([0.5, 1.0])
    assert found["numbers", "others"].rates[0].value == 2.5 and str(found["numbers", "others"].rates[0]) == "+2.50"
    assert str(found["numbers", "the same"].rates[1]) == "0.50"
    assert found["numbers", "the same"].rates[1].interval == "too few to say"
    assert found["numbers", "none"].rows == 2
    assert found["words of the longer text", "more than twice as many"].rows == 1
    assert found["words of the longer text", "up to twice as many"].rows == 2


def test_below_ten_rows_there_is_no_interval_and_no_verdict() -> None:
    rows = [pair("He has 2 cats", "He has 3 cats", 0.0, 5.0 if place == 0 else 0.1) for place in range(9)]
    rows += [pair("a cat", "a dog", 1.0, 1.0 + place / 100) for place in range(10)]
    found = by_name(slices(rows, ()))
    few, enough = found["numbers", "others"], found["numbers", "none"]
    assert (few.rows, enough.rows) == (9, 10)
    assert [rate.interval for rate in few.rates] == ["too few to say"] * 2
    assert not any(rate.differs(9.0) for rate in few.rates) and all(rate.differs(9.0) for rate in enough.rates)
    assert [rate.interval for rate in enough.rates] == ["+0.02 to +0.07", "0.02 to 0.07"]


def test_the_size_of_an_error_is_never_below_nothing() -> None:
    rows = [pair("a cat", "a dog", 0.0, 5.0 if place == 0 else 0.0) for place in range(10)]
    error, size = slices(rows, ())[0].rates
    assert (error.value, error.low < 0) == (size.value, True)
    assert (size.low, size.high) == (0.0, error.high) and size.interval == "0.00 to 1.63"


def test_initials() -> None:
    assert has_initials("Carney changes the BoE", "carney changes the bank of england")
    assert has_initials("the bank of england", "the boe")
    assert not has_initials("the boe", "the boe is the bank of england")  # both have it
    assert not has_initials("he was here", "who asked so early", usual={"was"})
    assert not has_initials("an eu law", "a european union law")  # two letters come about by chance
    rows = [pair(f"it was {n}", f"we are seeing {n}", 1.0, 1.0) for n in range(9)]
    found = by_name(slices([*rows, pair("the boe", "the bank of england", 5.0, 3.0)], ()))
    assert found["initials for a name", "yes"].rows == 1  # "was" is in too many texts to mean "we are seeing"


def test_unordered_classes_have_no_direction_and_unfinished_answers_no_place() -> None:
    rows = [single("A short text", 0, 1), single("A text that is not as short", 2, 2), single("no", 1, 1)]
    assert columns_of(("news", "sport", "art")) == ["wrong"]
    assert all(len(part.rates) == 1 for part in slices(rows, ("news", "sport", "art")))
    lost = single("A text", 0, 0) | {"prediction": float("nan")}
    assert slices([*rows, lost], FIVE)[0].rows == 3
    unlabelled = single("A text", 0, 0) | {"label": float("nan")}
    assert slices([lost, unlabelled], FIVE) == []


def test_the_tables_and_the_file(tmp_path: Path) -> None:
    def edit(task: str, rows: list[dict[str, Any]]) -> None:
        for place, row in enumerate(rows):
            if task == "sst":
                row["text"] = "It is not bad." if place % 2 else "It is bad."
                row["prediction"] = row["label"] if place % 2 else (row["label"] + 1) % 5

    run = make_run(tmp_path / "run", edit_rows=edit)
    found = read_mistakes(run, tasks=["sst"], count=1)
    first = next(iter(tables(found)))
    assert first.title == "sst. Where the mistakes are"
    assert list(first.columns[3].cells) == ["50.0%", "[bold]100.0%[/]", "[bold]0.0%[/]"] * 1 + [
        "[bold]100.0%[/]",
        "[bold]0.0%[/]",
    ]
    write_mistakes(found, tmp_path / "errors.md", texts=False)
    text = (tmp_path / "errors.md").read_text()
    assert "| a negation | yes | 30 | **0.0%** (0.0% to 11.4%) |" in text
    assert f"- a negation: {RULES['a negation']}" in text and "- a contrast" not in text and "bad" not in text


def test_a_rate_of_one_row_says_that_it_is_too_few(tmp_path: Path) -> None:
    def edit(task: str, rows: list[dict[str, Any]]) -> None:
        if task == "sts":
            rows[0] |= {"text": "It is not so.", "label": 1.0, "prediction": 2.5}

    found = read_mistakes(make_run(tmp_path / "run", edit_rows=edit), tasks=["sts"], count=1)
    write_mistakes(found, tmp_path / "errors.md")
    text = (tmp_path / "errors.md").read_text()
    assert "| a negation | in one text | 1 | +1.50 (too few to say) | 1.50 (too few to say) |" in text
    assert "With 95% intervals, from 10 rows on. " in text
