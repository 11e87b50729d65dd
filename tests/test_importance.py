"""Which words mattered, on a model whose answers depend on a single word, by weights set by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minbert.delivery.importance import split_words, word_effects
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError
from tests.models import make
from tests.test_predictor import counting

TASKS: dict[str, Any] = {"cfimdb": {}, "quora": {}, "sts": {"head": "concat"}, "sst": {"normalise": True}}


@pytest.fixture(scope="module")
def predictor(tiny_encoder: Path) -> Predictor:
    """Every token's vector is (1, -1, 1, -1, ...), but that of "nice" (-1, 1, -1, 1, ...), which all layers leave as it
    is; of their maximum the second number is 1 with "nice" and -1 without. The heads read that number only."""
    tokenizer, model, manifest = make(tiny_encoder, TASKS, pooling="max")
    ((ids, _),) = tokenizer.encode(["nice"])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        table = model.encoder.embeddings.tokens.weight
        table[:, 0::2], table[:, 1::2] = 1.0, -1.0
        table[int(ids[1])] *= -1
        heads: Any = model.heads
        heads["cfimdb"].out.weight[1, 1] = 1.0  # the logit of "positive" is 1 or -1, that of "negative" 0
        heads["quora"].out.weight[0, 1] = 1.0
        heads["sst"].out.weight[3, 1] = 1.0
        heads["sts"].out.weight[0, 1], heads["sts"].out.weight[0, 32 + 1], heads["sts"].out.bias[0] = 1.0, 0.5, 2.0
    return Predictor(model, tokenizer, manifest)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def effects(predictor: Predictor, *texts: str, **more: Any) -> dict[str, list[tuple[int, str, float]]]:
    found = word_effects(predictor, *texts, **more)
    return {name: [(word.side, word.text, round(word.effect, 5)) for word in one.words] for name, one in found.items()}


def test_the_only_word_that_matters_has_the_whole_effect(predictor: Predictor) -> None:
    found = word_effects(predictor, "The sun, nice and warm!", tasks=["cfimdb"])["cfimdb"]
    assert (found.answer, found.skipped) == ("positive", 0)
    assert found.value == pytest.approx(sigmoid(1))
    expected = {"nice": sigmoid(1) - sigmoid(-1)}
    assert {word.text: pytest.approx(word.effect) for word in found.words} == {
        word: expected.get(word, 0.0) for word in ("The", "sun", ",", "nice", "and", "warm", "!")
    }
    assert found.strongest(1)[0].text == "nice"


def test_a_word_that_stands_twice_can_be_spared_once(predictor: Predictor) -> None:
    assert effects(predictor, "nice, nice", tasks=["cfimdb"]) == {
        "cfimdb": [(0, "nice", 0.0), (0, ",", 0.0), (0, "nice", 0.0)]
    }


def test_a_mask_in_the_place_of_a_word_takes_its_effect_too(predictor: Predictor) -> None:
    found = effects(predictor, "a nice day", tasks=["cfimdb"], masked=True)["cfimdb"]
    assert found == [(0, "a", 0.0), (0, "nice", round(sigmoid(1) - sigmoid(-1), 5)), (0, "day", 0.0)]


def test_a_class_that_was_not_answered_can_be_asked_about(predictor: Predictor) -> None:
    found = effects(predictor, "nice day", tasks=["cfimdb"], label="negative")["cfimdb"]
    assert found == [(0, "nice", round(sigmoid(-1) - sigmoid(1), 5)), (0, "day", 0.0)]


def test_of_a_pair_the_words_of_both_are_weighed(predictor: Predictor) -> None:
    """Similarity is 2 + 1 + 0.5 with "nice" in both; in the first text the word is worth 2, in the second 1. A
    paraphrase is answered as long as either has it, so that leaving out one changes nothing."""
    found = word_effects(predictor, "nice day", "a nice one")
    assert set(found) == {"quora", "sts"}
    assert found["sts"].value == pytest.approx(3.5)
    assert effects(predictor, "nice day", "a nice one") == {
        "quora": [(0, "nice", 0.0), (0, "day", 0.0), (1, "a", 0.0), (1, "nice", 0.0), (1, "one", 0.0)],
        "sts": [(0, "nice", 2.0), (0, "day", 0.0), (1, "a", 0.0), (1, "nice", 1.0), (1, "one", 0.0)],
    }


def test_a_task_of_one_text_says_nothing_of_the_second(predictor: Predictor) -> None:
    found = effects(predictor, "nice day", "a nice one", tasks=["cfimdb", "sts"])
    assert [word for _, word, _ in found["cfimdb"]] == ["nice", "day"]
    assert len(found["sts"]) == 5


def test_a_normalised_task_finds_the_places_of_the_text_as_it_was_written(predictor: Predictor) -> None:
    text = "It's  NICE."
    found = word_effects(predictor, text, tasks=["sst", "cfimdb"])
    for one in found.values():
        assert [text[word.start : word.end] for word in one.words] == ["It's", "NICE", "."]
        assert [word.effect > 0.1 for word in one.words] == [False, True, False]


def test_everything_is_encoded_in_one_call_and_each_variant_once(predictor: Predictor) -> None:
    with counting(predictor) as rows:
        word_effects(predictor, "a nice day", "a day", tasks=["sts"])
    assert sum(rows) == 2 + 3 + 2 - 1  # both texts, three and two variants; "a nice day" less "nice" is "a day"


def test_words_beyond_the_limit_are_counted(predictor: Predictor) -> None:
    found = word_effects(predictor, "a nice day and a sun", tasks=["cfimdb"], limit=4)["cfimdb"]
    assert ([word.text for word in found.words], found.skipped) == (["a", "nice", "day", "and"], 2)
    pair = word_effects(predictor, "a nice day and a sun", "nice", tasks=["sts"], limit=4)["sts"]
    assert [(word.side, word.text) for word in pair.words] == [(0, "a"), (0, "nice"), (0, "day"), (1, "nice")]
    assert pair.skipped == 3


def test_a_single_word_can_be_left_out_and_an_empty_text_has_none(predictor: Predictor) -> None:
    assert effects(predictor, "nice", tasks=["cfimdb"])["cfimdb"] == [(0, "nice", round(sigmoid(1) - sigmoid(-1), 5))]
    assert effects(predictor, "  ", tasks=["cfimdb"]) == {"cfimdb": []}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tasks": ["nothing"]}, 'no task "nothing"'),
        ({"tasks": ["sts"]}, "reads two texts; found one"),
        ({"label": "great", "tasks": ["cfimdb"]}, 'cfimdb has no class "great"; expected one of: negative, positive'),
        ({"limit": 0}, "limit is 0; expected one word or more"),
    ],
)
def test_what_cannot_be_asked_is_refused(predictor: Predictor, more: dict[str, Any], message: str) -> None:
    with pytest.raises(MinbertError, match=message):
        word_effects(predictor, "nice", **more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's well-known, isn't it?", ["It's", "well-known", ",", "isn't", "it", "?"]),
        ("(great!) :) 🙂", ["(", "great", "!)", ":)", "🙂"]),
        ("日本 ok好x", ["日", "本", "ok", "好", "x"]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
        ("...", ["..."]),
        ("", []),
    ],
)
def test_words_are_what_a_reader_would_call_words(text: str, words: list[str]) -> None:
    assert [word for word, _, _ in split_words(text)] == words


@given(st.text())
def test_words_are_in_their_places_and_leave_out_only_blanks(text: str) -> None:
    end, kept = 0, ""
    for word, start, stop in split_words(text):
        assert end <= start < stop
        assert text[start:stop] == word
        end, kept = stop, kept + word
    assert kept == "".join(text.split())


def test_the_example_of_the_page_runs(tiny_encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, model, manifest = make(tiny_encoder, {"sentiment": {"like": "sst"}})
    page = (Path(__file__).parent.parent / "docs" / "try.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "docs/try.md", "exec"), {"model": Predictor(model, tokenizer, manifest)})
    assert "('wonderful', 13, 22, " in capsys.readouterr().out
