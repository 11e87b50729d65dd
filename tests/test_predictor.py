"""The predictor: the model's own answers, each text encoded once, and the same from anywhere."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minbert.data.inputs import tokenize
from minbert.data.raw import Examples
from minbert.delivery.predictor import Predictor, as_rows
from minbert.errors import MinbertError
from minbert.model.answers import Answers, Decision, decode
from minbert.model.encoder import POOLINGS
from minbert.model.multitask import outputs_of
from minbert.model.packed import Packed
from minbert.model.saved import load_model, save_model
from minbert.tasks import BUILT_IN
from tests.models import PAIRS, TEXTS, THREE, make

EVERY_WAY: dict[str, dict[str, Any]] = {
    "sst": {},
    "quora": {"head": "ph"},
    "sts": {"head": "cosine", "pooling": "mean"},
    "joint": {"like": "quora", "head": "linear"},
    "score": {"kind": "regression", "train": "a.tsv", "pooling": "pooler"},
}


def predictor_for(encoder: Path, tasks: dict[str, dict[str, Any]] = EVERY_WAY, **model: Any) -> Predictor:
    tokenizer, built, manifest = make(encoder, tasks, **model)
    return Predictor(built, tokenizer, manifest)


@pytest.fixture(scope="module")
def predictor(tiny_encoder: Path) -> Predictor:
    return predictor_for(tiny_encoder)


@contextmanager
def counting(predictor: Predictor) -> Iterator[list[int]]:
    """The rows of every batch that the encoder is given."""
    rows: list[int] = []
    encoder = predictor.model.encoder
    read = encoder.packed

    def packed(batch: Packed, **how: Any) -> torch.Tensor:
        rows.append(sum(count for count, _ in batch.runs))
        return read(batch, **how)

    encoder.packed = packed  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del encoder.packed


def encoded(predictor: Predictor, *given: Any, **more: Any) -> int:
    with counting(predictor) as rows:
        predictor.predict(*given, **more)
    return sum(rows)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(MinbertError) as caught:
        call()
    return str(caught.value)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=1e-5)


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("common", [False, True])
def test_it_says_what_the_model_says(tiny_encoder: Path, common: bool) -> None:
    predictor = predictor_for(tiny_encoder, common_layer=common, pooling="max")
    found = predictor.outputs(TEXTS, PAIRS)
    assert list(found) == list(EVERY_WAY)
    for name, task in predictor.tasks.items():
        examples = Examples([], TEXTS, PAIRS if task.is_pair else None, None)
        expected = outputs_of(predictor.model, tokenize(task, examples, predictor.tokenizer, 64))
        assert found[name].shape == (len(TEXTS), task.outputs)
        np.testing.assert_allclose(found[name], expected, atol=1e-5)


def test_answers_are_decoded_with_the_decisions_of_dev(predictor: Predictor) -> None:
    decisions = {"sst": Decision(temperature=3.0), "joint": Decision(threshold=0.99)}
    decided = Predictor(predictor.model, predictor.tokenizer, replace(predictor.manifest, decisions=decisions))
    outputs = decided.outputs(TEXTS, PAIRS)
    for name, answers in decided.answers(TEXTS, PAIRS).items():
        expected = decode(decided.tasks[name], outputs[name], decisions.get(name))
        np.testing.assert_allclose(answers.predictions, expected.predictions, atol=1e-5)
        if answers.probabilities is not None:
            np.testing.assert_allclose(answers.probabilities, expected.probabilities, atol=1e-5)
    plain = predictor.answers(TEXTS, PAIRS)["sst"].probabilities
    tempered = decided.answers(TEXTS, PAIRS)["sst"].probabilities
    assert plain is not None
    assert tempered is not None
    assert tempered.max() < plain.max()


def test_rows_are_plain_data(predictor: Predictor) -> None:
    found = predictor.predict(TEXTS, PAIRS)
    answers = predictor.answers(TEXTS, PAIRS)
    assert set(found["sts"][0]) == set(found["score"][0]) == {"score"}
    assert found["sts"][2]["score"] == pytest.approx(answers["sts"].predictions[2])
    row = found["sst"][0]
    assert list(row["probabilities"]) == list(predictor.tasks["sst"].classes)
    assert row["label"] == max(row["probabilities"], key=row["probabilities"].get)
    assert row["probability"] == row["probabilities"][row["label"]]
    assert sum(row["probabilities"].values()) == pytest.approx(1)
    assert all(type(value) is float for value in row["probabilities"].values())


def test_a_label_below_the_threshold_has_its_own_probability() -> None:
    answers = Answers(np.array([0.0, 1.0]), np.array([[0.3, 0.7], [0.1, 0.9]]))
    assert as_rows(BUILT_IN["quora"], answers) == [
        {"label": "different", "probability": 0.3, "probabilities": {"different": 0.3, "duplicate": 0.7}},
        {"label": "duplicate", "probability": 0.9, "probabilities": {"different": 0.1, "duplicate": 0.9}},
    ]


def test_one_text_gets_the_tasks_that_read_one(predictor: Predictor) -> None:
    assert list(predictor.predict(TEXTS)) == ["sst", "score"]
    assert list(predictor.predict(TEXTS, PAIRS)) == list(EVERY_WAY)


def test_tasks_by_name(predictor: Predictor) -> None:
    assert list(predictor.predict(TEXTS, PAIRS, tasks=["sts", "sst"])) == ["sts", "sst"]
    assert list(predictor.predict(TEXTS, tasks=iter(["sst"]))) == ["sst"]
    same(
        predictor.outputs(TEXTS, PAIRS, ["sts"]),
        {"sts": predictor.outputs(TEXTS, PAIRS)["sts"]},
    )


def test_order_and_duplicates_are_kept(predictor: Predictor) -> None:
    order = [4, 0, 0, 3, 1, 4, 2]
    plain = predictor.outputs(TEXTS, PAIRS)
    found = predictor.outputs([TEXTS[row] for row in order], [PAIRS[row] for row in order])
    same(found, {name: values[order] for name, values in plain.items()})


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9))
def test_a_rows_answer_does_not_depend_on_its_company(predictor: Predictor, rows: list[tuple[int, int]]) -> None:
    texts, pairs = [TEXTS[first] for first, _ in rows], [PAIRS[second] for _, second in rows]
    found = predictor.outputs(texts, pairs)
    for number, (text, pair) in enumerate(zip(texts, pairs, strict=True)):
        alone = predictor.outputs([text], [pair])
        same({name: values[number : number + 1] for name, values in found.items()}, alone)


def test_nothing_asked_nothing_said(predictor: Predictor) -> None:
    assert predictor.predict([]) == {"sst": [], "score": []}
    assert predictor.predict([], []) == {name: [] for name in EVERY_WAY}
    assert predictor.outputs([])["sst"].shape == (0, 5)
    assert predictor.embed([]).shape == (0, 32)


def test_long_and_empty_and_strange_texts_are_answered(predictor: Predictor) -> None:
    texts = ["nice " * 500, "", "\n", "日本語 🙂", "\ud83d"]
    found = predictor.predict(texts, texts[::-1])
    assert all(len(rows) == len(texts) for rows in found.values())
    assert np.isfinite(predictor.outputs(texts, texts[::-1])["sts"]).all()


# --- what is refused ------------------------------------------------------------------------------------------------


def test_an_unknown_task_suggests_a_near_one(predictor: Predictor) -> None:
    message = refusal(lambda: predictor.predict(TEXTS, tasks=["qora"]))
    assert message == 'no task "qora" (did you mean "quora"?); this model has: sst, quora, sts, joint, score'


def test_a_task_of_two_texts_without_the_second(predictor: Predictor) -> None:
    assert refusal(lambda: predictor.predict(TEXTS, tasks=["sts"])) == 'the task "sts" reads two texts; found one'


def test_a_model_of_pairs_alone_without_the_second(tiny_encoder: Path) -> None:
    pairs = predictor_for(tiny_encoder, {"quora": {}, "sts": {}})
    assert refusal(lambda: pairs.predict(TEXTS)) == "every task of this model reads two texts: quora, sts; found one"


def test_texts_and_pairs_that_do_not_match(predictor: Predictor) -> None:
    assert refusal(lambda: predictor.predict(TEXTS, PAIRS[:2])) == "5 texts and 2 pairs; expected as many of each"
    assert refusal(lambda: predictor.predict([], PAIRS)) == "0 texts and 5 pairs; expected as many of each"


def test_one_string_is_not_a_list_of_letters(predictor: Predictor) -> None:
    assert refusal(lambda: predictor.predict("nice")) == "texts is one string; expected a list of strings"
    assert refusal(lambda: predictor.predict(["nice"], "a")) == "pairs is one string; expected a list of strings"
    assert refusal(lambda: predictor.embed("nice")) == "texts is one string; expected a list of strings"


def test_any_sequence_will_do(predictor: Predictor) -> None:
    same(predictor.outputs(np.array(TEXTS), tuple(PAIRS)), predictor.outputs(TEXTS, PAIRS))  # type: ignore[arg-type]


def test_what_is_no_text(predictor: Predictor) -> None:
    assert "expected a string" in refusal(lambda: predictor.predict(["nice", None]))  # type: ignore[list-item]


# --- each text once -------------------------------------------------------------------------------------------------


def test_a_text_is_encoded_once_for_all_tasks_that_read_it(tiny_encoder: Path) -> None:
    many = predictor_for(tiny_encoder, {"sst": {}, "again": {"like": "sst", "pooling": "mean"}, "cfimdb": {}})
    assert encoded(many, TEXTS) == len(TEXTS)


@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        (["linear", "mlp", "linear"], 5),  # three heads, one reading
        (["cosine", "interaction", "difference"], 10),  # both texts
        (["ph", "linear", "dpha"], 10),  # both orders, of which linear reads one
        (["ph", "linear", "cosine"], 20),
    ],
)
def test_heads_that_read_alike_share_one_encoding(tiny_encoder: Path, heads: list[str], rows: int) -> None:
    tasks = {f"task{number}": {"like": "sts", "head": head} for number, head in enumerate(heads)}
    pairs = predictor_for(tiny_encoder, tasks)
    assert encoded(pairs, TEXTS, [f"{text} bonus" for text in TEXTS]) == rows


def test_equal_texts_are_encoded_once(tiny_encoder: Path) -> None:
    several = predictor_for(tiny_encoder, {"sst": {}, "sts": {"head": "cosine"}, "quora": {"head": "ph"}})
    assert encoded(several, ["nice"] * 6, tasks=["sst"]) == 1
    # sst and sts: "nice" and "the sun", whichever side they stand on
    assert encoded(several, ["nice", "the sun", "nice"], ["the sun", "nice", "nice"], tasks=["sst", "sts"]) == 2
    # ph: (nice, the sun), its other order, which is the second row, and (nice, nice), whose other order is itself
    assert encoded(several, ["nice", "the sun", "nice"], ["the sun", "nice", "nice"], tasks=["quora"]) == 3


def test_a_task_that_was_not_asked_for_costs_nothing(tiny_encoder: Path) -> None:
    three = predictor_for(tiny_encoder, THREE)
    assert encoded(three, TEXTS, PAIRS, tasks=["sst"]) == len(TEXTS)
    assert encoded(three, TEXTS, PAIRS) == 2 * len(TEXTS)  # the texts for sst, the pairs for quora and sts
    assert encoded(three, []) == 0


# --- vectors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", POOLINGS)
def test_embed_gives_the_encoders_vectors(predictor: Predictor, how: Any) -> None:
    texts = [TEXTS[3], TEXTS[0], TEXTS[3]]
    with counting(predictor) as rows:
        found = predictor.embed(texts, pooling=how)
    assert sum(rows) == 2
    expected = torch.from_numpy(np.vstack([predictor.embed([text], pooling=how) for text in texts]))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.shape == (3, 32)


def test_embed_pools_as_the_model_does(tiny_encoder: Path) -> None:
    pooled = predictor_for(tiny_encoder, pooling="max")
    np.testing.assert_array_equal(pooled.embed(TEXTS), pooled.embed(TEXTS, pooling="max"))


# --- from anywhere --------------------------------------------------------------------------------------------------


def test_it_is_loaded_from_a_folder(predictor: Predictor, tmp_path: Path) -> None:
    save_model(tmp_path / "model", predictor.model, predictor.tokenizer, predictor.manifest)
    for folder in (tmp_path / "model", str(tmp_path / "model")):
        same(Predictor.load(folder).outputs(TEXTS, PAIRS), predictor.outputs(TEXTS, PAIRS))
    assert load_model(tmp_path / "model")[2] == predictor.manifest


def test_it_can_be_pickled(predictor: Predictor) -> None:
    again = pickle.loads(pickle.dumps(predictor))
    same(again.outputs(TEXTS, PAIRS), predictor.outputs(TEXTS, PAIRS))
    assert again.predict(TEXTS, PAIRS) == predictor.predict(TEXTS, PAIRS)
    assert again.manifest == predictor.manifest


def test_a_model_that_was_training_answers_without_dropout(tiny_encoder: Path) -> None:
    tokenizer, model, manifest = make(tiny_encoder, dropout=0.5)
    predictor = Predictor(model.train(), tokenizer, manifest)
    same(predictor.outputs(TEXTS, PAIRS), predictor.outputs(TEXTS, PAIRS))


def test_four_threads_get_what_one_gets(predictor: Predictor) -> None:
    asked = [([f"{text} {'nice ' * number}" for text in TEXTS], PAIRS) for number in range(16)]
    expected = [predictor.predict(*one) for one in asked]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda one: predictor.predict(*one), asked))
    assert found == expected
