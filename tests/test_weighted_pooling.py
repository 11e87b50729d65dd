"""Pooling with weights by part of speech: from the words to the pooled vectors, on every way that they take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minbert.data.cache import TokenCache
from minbert.data.inputs import Inputs, collate, tokenize
from minbert.data.raw import Examples
from minbert.data.streams import Part
from minbert.data.tokenizer import Tokenizer, Tokens, Truncation
from minbert.delivery.embedder import Embedder
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError
from minbert.evaluating import evaluate_model
from minbert.experiment import train
from minbert.model.encoder import pool_packed
from minbert.model.multitask import encode_pooled, outputs_of
from minbert.model.packed import pack
from minbert.model.runner import CpuRunner, PlainRunner
from minbert.recipes import parse_recipe
from minbert.training.graphs import lay_out, layout_of
from tests import tagger
from tests.models import PAIRS, TEXTS, make
from tests.runs import small_recipe
from tests.sequences import small_encoder, tokens_of
from tests.tagger import WEIGHTS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _tagger(monkeypatch: pytest.MonkeyPatch) -> None:
    tagger.use(monkeypatch)


def weighed(lengths: list[int], seed: int = 0) -> Tokens:
    tokens = tokens_of(lengths, seed=seed)
    rng = np.random.default_rng(seed + 1)
    return replace(tokens, weights=rng.uniform(0.25, 2, len(tokens.ids)).astype(np.float32))


# --- words to weights -----------------------------------------------------------------------------------------------


def test_each_token_has_the_weight_of_its_word(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    tokens = tokenizer.encode(["The cats sat."], weights=WEIGHTS)
    assert tokenizer.words(tokens.ids) == ["[CLS]", "the", "cat", "##s", "sat", ".", "[SEP]"]
    assert tokens.weights is not None and tokens.weights.dtype == np.float32
    assert tokens.weights.tolist() == [0.75, 0.25, 1.5, 1.5, 2.0, 0.75, 0.75]
    plain = tokenizer.encode(["The cats sat."])
    assert plain.weights is None and np.array_equal(plain.ids, tokens.ids)
    assert tokenizer.encode(["the dog"], weights={"noun": 3}).weights.tolist() == [1, 1, 3, 1]  # type: ignore[union-attr]


def test_pairs_truncation_and_unknown_words(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    tokens = tokenizer.encode(["a dog ran", ""], ["elephants sang and sang", "a"], weights=WEIGHTS, max_tokens=7)
    assert tokenizer.words(tokens.ids[:7]) == ["[CLS]", "a", "dog", "[SEP]", "[UNK]", "sang", "[SEP]"]
    assert tokens.weights is not None
    assert tokens.weights.tolist() == [0.75, 0.25, 1.5, 0.75, 1.5, 2.0, 0.75, 0.75, 0.75, 0.25, 0.75]


def test_weights_stay_with_their_tokens(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    texts = ["The cats sat.", "a dog ran and then the bird sang", "hello"]
    tokens = tokenizer.encode(texts, weights=WEIGHTS)
    swapped = tokens.take([2, 0])
    assert swapped.weights is not None and swapped.weights[3:].tolist() == tokens.weights[:7].tolist()  # type: ignore[index]
    joined = Tokens.join([swapped, tokens])
    assert joined.weights is not None and joined.weights[3:10].tolist() == tokens.weights[:7].tolist()  # type: ignore[index]
    assert Tokens.join([swapped, tokenizer.encode(texts)]).weights is None


def test_a_batch_of_tasks_with_and_without_weights(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    recipe = parse_recipe(
        {"tasks": {"sst": {"pooling": "weighted"}, "cfimdb": {}}, "model": {"pooling_weights": WEIGHTS}}
    )
    examples = Examples(["1"], ["The cats sat."], None, np.zeros(1))
    data = {
        task.name: tokenize(task, examples, tokenizer, 32, weights=WEIGHTS if task.pooling else None)
        for task in recipe.tasks
    }
    both = collate((Part("sst", np.array([0])), Part("cfimdb", np.array([0]))), data)
    assert both.tokens.weights is not None
    assert both.tokens.weights.reshape(2, 7).tolist() == [[0.75, 0.25, 1.5, 1.5, 2.0, 0.75, 0.75], [1] * 7]
    assert collate((Part("cfimdb", np.array([0])),), data).tokens.weights is None


def test_the_cache_keeps_them_under_a_key_of_their_own(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer, cache = Tokenizer.load(tiny_folder), TokenCache(tmp_path / "tokens", smallest=0, warn=pytest.fail)
    for weights in (None, WEIGHTS, {"verb": 3.0}):
        first = cache.encode(tokenizer, ["The cats sat."], max_tokens=32, weights=weights)
        again = cache.encode(tokenizer, ["The cats sat."], max_tokens=32, weights=weights)
        expected = tokenizer.encode(["The cats sat."], weights=weights).weights
        for found in (first, again):
            assert (found.weights is None) == (expected is None)
            assert expected is None or np.array_equal(found.weights, expected)  # type: ignore[arg-type]
    assert (cache.hits, cache.misses) == (3, 3)


# --- weights to vectors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_runs", [True, False])
def test_it_is_the_weighted_mean(by_runs: bool) -> None:
    tokens = weighed([1, 3, 3, 7])
    packed = pack(tokens, small_encoder().config, CPU)
    hidden = torch.randn((14, 5), generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = pool_packed(hidden, packed, "weighted", by_runs=by_runs)
    assert tokens.weights is not None
    for row, (start, end) in enumerate(zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)):
        expected = np.average(hidden[start:end].detach().numpy(), axis=0, weights=tokens.weights[start:end])
        np.testing.assert_allclose(found[row].detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    found[1].sum().backward()
    shares = tokens.weights[1:4] / tokens.weights[1:4].sum()
    assert hidden.grad is not None
    np.testing.assert_allclose(hidden.grad[1:4].numpy(), np.tile(shares[:, None], 5), rtol=1e-5)
    assert not hidden.grad[4:].any()
    even = replace(packed, weights=torch.full((14,), 0.3))
    mean = pool_packed(hidden, packed, "mean", by_runs=by_runs)
    torch.testing.assert_close(pool_packed(hidden, even, "weighted", by_runs=by_runs), mean)


@pytest.mark.parametrize("training", [False, True])
def test_both_runners_on_a_cpu(training: bool) -> None:
    encoder = small_encoder().train(training)
    packed = pack(weighed([2, 5, 5, 9]), encoder.config, CPU)
    plain = PlainRunner(encoder, "fp32")(packed, ["weighted", "cls"])
    fast = CpuRunner(encoder, "fp32")(packed, ["weighted"])
    torch.testing.assert_close(fast["weighted"], plain["weighted"], rtol=1e-4, atol=1e-5)
    assert plain["weighted"].shape == (4, 32)


def test_a_fixed_layout_holds_them() -> None:
    """What is left of its tokens weighs 1, and its empty sequences give no number that is not one."""
    recipe = parse_recipe({"tasks": {"sst": {"pooling": "weighted"}}, "model": {"pooling_weights": WEIGHTS}})
    inputs = Inputs(recipe.tasks[0], (weighed([3, 9, 20]),), np.zeros(3), Truncation())
    batch = collate((Part("sst", np.array([2, 0, 1])),), {"sst": inputs})
    layout = layout_of(batch, rates=1)
    assert layout.weighted and layout != replace(layout, weighted=False)
    block = np.full(layout.size, -7, np.int32)
    lay_out(batch, layout, small_encoder().config, block)
    packed = layout.batch(torch.from_numpy(block)).packed
    assert packed.weights is not None and batch.tokens.weights is not None
    assert packed.weights[:32].tolist() == batch.tokens.weights.tolist()
    assert packed.weights[32:].tolist() == [1.0] * (layout.tokens - 32)
    hidden = torch.randn((layout.tokens, 4), requires_grad=True)
    found = pool_packed(hidden, packed, "weighted", by_runs=False)
    assert found.isfinite().all()
    alone = pool_packed(hidden[:32], pack(batch.tokens, small_encoder().config, CPU), "weighted")
    torch.testing.assert_close(found[:3], alone)
    found[:3].sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all() and not hidden.grad[32:].any()


def test_without_weights_it_says_so() -> None:
    encoder = small_encoder()
    with pytest.raises(MinbertError, match=r'pooling is "weighted", but the tokens have no weights'):
        encode_pooled(PlainRunner(encoder, "fp32"), tokens_of([3, 4]), ["weighted"])


# --- whole models ---------------------------------------------------------------------------------------------------


def test_a_model_answers_the_same_on_every_way(tiny_encoder: Path) -> None:
    tasks = {"sst": {}, "sts": {"head": "cosine"}, "quora": {"pooling": "mean"}}
    tokenizer, model, manifest = make(tiny_encoder, tasks, pooling="weighted", pooling_weights=WEIGHTS)
    predictor = Predictor(model, tokenizer, manifest)
    found = predictor.outputs(TEXTS, PAIRS)
    for name, task in model.tasks.items():
        examples = Examples([], TEXTS, PAIRS if task.is_pair else None, None)
        weights = WEIGHTS if model.poolings[name] == "weighted" else None
        inputs = tokenize(task, examples, tokenizer, 64, weights=weights)
        for outputs in (outputs_of(model, inputs), predictor.outputs_of(inputs)):
            np.testing.assert_allclose(found[name], outputs, rtol=1e-4, atol=1e-5)
    embedder = Embedder(model.encoder, tokenizer, pooling="weighted", pooling_weights=WEIGHTS, max_tokens=64)
    np.testing.assert_allclose(predictor.embed(TEXTS), embedder.embed(TEXTS), rtol=1e-4, atol=1e-5)
    assert np.abs(predictor.embed(TEXTS) - predictor.embed(TEXTS, pooling="mean")).max() > 1e-3


def test_a_run_from_training_to_scores(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = small_recipe(
        tiny_encoder,
        "sst",
        "sts",
        tasks={"sts": {"head": "cosine", "pooling": "weighted"}},
        model={"pooling_weights": WEIGHTS},
        sampler={"kind": "all"},
        training={"epochs": 1},
    )
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    again = evaluate_model(run.model, data=small_data, device="cpu", samples=5)
    found = run.results["dev"]["sts"]["metrics"]["pearson"]["value"]
    assert again["sts"].metrics["pearson"].value == pytest.approx(found, abs=1e-5)
    with pytest.raises(MinbertError, match=r'pooling is "weighted"; this encoder has: cls'):
        evaluate_model(run.model, data=small_data, precision="int8", samples=5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"pooling": "weighted"}, 'pooling is "weighted"; expected model.pooling_weights, such as { verb = 2, '),
        (
            {"pooling_weights": {"verb": 2}},
            'model.pooling_weights without pooling; expected model.pooling = "weighted"',
        ),
        (
            {"pooling": "weighted", "pooling_weights": {"verbs": 2}},
            'names "verbs" (did you mean "verb"?); known: verb, ',
        ),
        ({"pooling": "weighted", "pooling_weights": {"verb": 0}}, "model.pooling_weights.verb is 0.0; expected 0.001"),
    ],
)
def test_recipes_that_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(MinbertError) as caught:
        parse_recipe({"tasks": {"sst": {}}, "model": model})
    assert message in str(caught.value)


def test_embedders_that_are_refused(tiny_folder: Path) -> None:
    for options in ({"pooling": "weighted"}, {"pooling": "mean", "pooling_weights": {"verb": 2.0}}):
        with pytest.raises(MinbertError, match='expected "weighted" with pooling_weights, or neither'):
            Embedder.load(tiny_folder, **options)  # type: ignore[arg-type]
