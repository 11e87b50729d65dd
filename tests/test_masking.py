"""Masked-language modelling: which tokens are hidden, what they cost (against transformers), and runs of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import BertConfig, BertForMaskedLM, MPNetConfig, MPNetForMaskedLM

from minbert.config import SAMPLE, Recipe
from minbert.data.inputs import Inputs, collate
from minbert.data.masking import Masking
from minbert.data.raw import read_split
from minbert.data.samplers import make_sampler
from minbert.data.streams import Part
from minbert.data.tokenizer import Tokenizer, Truncation
from minbert.delivery.files import predict_file
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError
from minbert.evaluating import evaluate_model
from minbert.evaluation.evaluate import labels_of, quick_scores
from minbert.evaluation.report import write_report
from minbert.evaluation.results import compare_runs, read_predictions, read_results
from minbert.experiment import Run, new_model, train
from minbert.model.heads import Vocabulary
from minbert.model.multitask import MultitaskModel, outputs_of, ready
from minbert.preparing import prepare
from minbert.recipes import as_dict, parse_recipe
from minbert.task_checks import check_task
from minbert.tasks import Task
from minbert.training.gradients import add_gradients
from minbert.training.losses import build_loss
from minbert.training.step import TrainStep
from tests.runs import Listener, Stopped, small_recipe, unlike
from tests.sequences import PIECES, VOCABULARY, masking_of, padded, texts_of

CPU = torch.device("cpu")


def words_of(ids: NDArray[np.int32]) -> list[list[int]]:
    """The places of each word, by a plain loop."""
    words: list[list[int]] = []
    for place, number in enumerate(ids.tolist()):
        if number in PIECES and place and ids[place - 1] >= 5:
            words[-1].append(place)
        elif number >= 5:
            words.append([place])
    return words


# --- which tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_the_rates_are_those_of_devlin(rate: float, whole_words: bool) -> None:
    ids = texts_of([20] * 5000).ids
    hidden, chosen = masking_of(rate=rate, whole_words=whole_words).hide(ids, np.random.default_rng(0))
    text = int((ids >= 5).sum())
    assert len(chosen) / text == pytest.approx(rate, abs=1e-4)
    before, after = ids[chosen], hidden[chosen]
    assert np.mean(after == 4) == pytest.approx(0.8, abs=0.01)
    # Of the tenth that is replaced, one in 35 comes out as it was
    assert np.mean(after == before) == pytest.approx(0.1 + 0.1 / 35, abs=0.01)
    replaced = after[(after != 4) & (after != before)]
    assert set(replaced.tolist()) == set(range(5, VOCABULARY)), "any word, and nothing special"
    counts = np.bincount(replaced)[5:]
    assert counts.std() < 0.25 * counts.mean()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.floats(0.01, 1), st.booleans(), st.integers(0, 99))
@settings(deadline=None)
def test_only_chosen_tokens_change_and_special_ones_never(
    lengths: list[int], rate: float, whole_words: bool, seed: int
) -> None:
    ids = texts_of(lengths, seed).ids
    before = ids.copy()
    hidden, chosen = masking_of(rate=rate, whole_words=whole_words).hide(ids, np.random.default_rng(seed))
    assert np.array_equal(ids, before), "the data stays as it was"
    assert (ids[chosen] >= 5).all()
    assert np.array_equal(chosen, np.unique(chosen))
    assert (np.delete(hidden, chosen) == np.delete(ids, chosen)).all()
    wanted = round(rate * int((ids >= 5).sum()))
    if whole_words:
        words = words_of(ids)
        assert sum(len(word) for word in words if word[0] in chosen) == len(chosen)
        assert all(set(word) <= set(chosen) or not set(word) & set(chosen) for word in words), "none is split"
        assert len(chosen) > wanted - max(map(len, words)) or len(chosen) == wanted
        assert len(chosen) <= wanted or sum(word[0] in chosen for word in words) == 1
    else:
        assert len(chosen) == max(1, wanted)


def test_without_text_there_is_nothing_to_guess() -> None:
    hidden, chosen = masking_of().hide(np.array([2, 1, 3, 2, 3], np.int32), np.random.default_rng(0))
    assert hidden.tolist() == [2, 1, 3, 2, 3]
    assert len(chosen) == 0


def test_a_piece_after_a_special_token_is_a_word() -> None:
    """Nothing is joined across the border of two texts."""
    ids = np.array([2, 30, 31, 3, 30, 3], np.int32)
    for seed in range(20):
        chosen = masking_of(rate=0.4, whole_words=True).choose(ids, np.random.default_rng(seed)).tolist()
        assert chosen in ([1, 2], [4])


MPNET_WORDS = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "a", "cat", "##s", "dog", "##", "<mask>"]


def test_a_tokenizers_pieces(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    special, continues = tokenizer.pieces()
    assert np.flatnonzero(special).tolist() == [0, 1, 2, 3, 4]
    assert tokenizer.words(np.flatnonzero(continues)) == ["##s"]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in MPNET_WORDS))
    (tmp_path / "config.json").write_text('{"model_type": "mpnet", "max_position_embeddings": 34}')
    mpnet = Tokenizer.load(tmp_path)
    special, continues = mpnet.pieces()
    assert mpnet.words(np.flatnonzero(special)) == ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>"]
    assert mpnet.words(np.flatnonzero(continues)) == ["##s"]
    task = parse_recipe({"tasks": {"mlm": masked_row(whole_words=True, mask_rate=0.5)}}).tasks[0]
    tokens = mpnet.encode(["cats dogs"])
    for seed in range(10):
        _, chosen = Masking.of(task, mpnet, seed=seed, place=0).hide(tokens.ids, np.random.default_rng(seed))
        assert chosen.tolist() in ([1, 2], [3, 4]), "<s> cat ##s dog ##s </s>"


# --- batches --------------------------------------------------------------------------------------------------------


def masked_row(**changes: Any) -> dict[str, Any]:
    return {"kind": "masked", "train": "sentiment-train.tsv", "dev": "sentiment-dev.tsv", **changes}


def inputs_of(lengths: list[int], *, seed: int = 0, **settings: Any) -> Inputs:
    task = parse_recipe({"tasks": {"mlm": masked_row()}}).tasks[0]
    return Inputs(task, (texts_of(lengths, seed),), None, Truncation(), masking_of(**settings))


LENGTHS = [3, 9, 1, 5, 7, 20, 2, 14]


def test_a_batch_has_the_hidden_ids_and_what_they_were() -> None:
    inputs = inputs_of(LENGTHS)
    rows = np.array([4, 0, 5, 7])
    batch = collate((Part("mlm", rows, 3),), {"mlm": inputs})
    plain = inputs.views[0].take(rows[np.argsort(inputs.views[0].lengths[rows], kind="stable")])
    assert batch.tokens.offsets.tolist() == plain.offsets.tolist(), "sorted by length"
    (part,) = batch.parts
    assert part.index.shape == (1, round(0.15 * (7 + 3 + 20 + 14)))
    places = part.index[0]
    assert part.labels.dtype == np.float32
    assert plain.ids[places].tolist() == part.labels.tolist()
    assert np.delete(batch.tokens.ids, places).tolist() == np.delete(plain.ids, places).tolist()
    assert (batch.tokens.ids[places] != plain.ids[places]).any()
    assert (part.texts, batch.rows) == (4, 4), "rows as the data counts them"


def hidden_places(part: Part, inputs: Inputs) -> list[tuple[int, ...]]:
    batch = collate((part,), {"mlm": inputs})
    return [tuple(batch.tokens.ids), tuple(batch.parts[0].index[0])]


def test_masks_follow_from_seed_pass_and_rows() -> None:
    rows = np.arange(8)
    first = hidden_places(Part("mlm", rows, 0), inputs_of(LENGTHS))
    assert hidden_places(Part("mlm", rows, 0), inputs_of(LENGTHS)) == first
    others = [
        hidden_places(Part("mlm", rows, 1), inputs_of(LENGTHS)),
        hidden_places(Part("mlm", rows[::-1], 0), inputs_of(LENGTHS)),
        hidden_places(Part("mlm", rows, 0), inputs_of(LENGTHS, place=1)),
    ]
    other_seed = inputs_of(LENGTHS)
    assert other_seed.masking is not None
    object.__setattr__(other_seed, "masking", masking_of(seed=2))
    others.append(hidden_places(Part("mlm", rows, 0), other_seed))
    assert all(found != first for found in others)


def test_masks_do_not_depend_on_what_else_is_in_the_step() -> None:
    mlm, other = inputs_of(LENGTHS), inputs_of([4, 6, 11], seed=5, place=1)
    task = parse_recipe({"tasks": {"sst": {}}}).tasks[0]
    sst = Inputs(task, other.views, np.array([1.0, 2.0, 3.0]), Truncation())
    part = Part("mlm", np.arange(8), 2)
    alone = collate((part,), {"mlm": mlm}).parts[0]
    batch = collate((Part("sst", np.array([2, 0]), 0), part), {"mlm": mlm, "sst": sst})
    found = batch.parts[1]
    assert found.labels.tolist() == alone.labels.tolist()
    assert batch.parts[0].index.shape == (1, 2)
    for place in batch.parts[0].index[0]:
        mine = batch.tokens[int(place)][0].tolist()
        assert mine in [row.tolist() for row, _ in other.views[0]], "another task's texts stay as they are"


@pytest.mark.parametrize("kind", ["proportional", "uniform", "mixed", "all", "sequential", "round-robin"])
def test_each_pass_has_its_number(kind: str) -> None:
    config = parse_recipe({"tasks": {"sst": {}}, "sampler": {"kind": kind}}).sampler
    sampler = make_sampler(config, {"mlm": np.full(8, 5)}, epochs=3, batch_size=4, seed=1)
    numbers = [part.number for epoch in sampler.epochs() for step in epoch for part in step]
    assert numbers == [0, 0, 1, 1, 2, 2]


def test_scores_are_of_the_same_masks_in_every_run() -> None:
    """Whatever the seed; a row's label is how many of its tokens are hidden."""
    one, other = inputs_of(LENGTHS, seed=0), inputs_of(LENGTHS, seed=0, place=3)
    object.__setattr__(other, "masking", masking_of(seed=7, place=3))
    assert one.hidden.tokens.ids.tolist() == other.hidden.tokens.ids.tolist()
    counts = labels_of(one)
    assert counts.tolist() == [
        int(one.hidden.guessed[start:end].sum())
        for start, end in zip(one.views[0].offsets, one.views[0].offsets[1:], strict=False)
    ]
    assert counts.sum() == round(0.15 * sum(LENGTHS))
    part = one.take(np.array([5, 7]))
    assert labels_of(part).sum() == round(0.15 * 34)


# --- what they cost: against transformers ---------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def published(kind: str, folder: Path) -> Any:
    """A random model of transformers with a prediction layer, in a folder as it would be published."""
    torch.manual_seed(3)
    words = sorted({word for path in SAMPLE.glob("sentiment-*.tsv") for word in path.read_text().lower().split()})
    special = MPNET_WORDS[:5] if kind == "mpnet" else BERT_SPECIAL
    vocabulary = [*special, *(word for word in words if word.isalpha()), *(["<mask>"] if kind == "mpnet" else [])]
    config: Any = {"vocab_size": len(vocabulary), "max_position_embeddings": 130, **SIZES}
    if kind == "mpnet":
        theirs: Any = MPNetForMaskedLM(MPNetConfig(**config, pad_token_id=1))
    else:
        theirs = BertForMaskedLM(BertConfig(**config, hidden_act="relu" if kind == "bert-relu" else "gelu"))
    with torch.no_grad():
        for weight in theirs.parameters():  # no bias at 0 and no norm at 1
            weight.add_(torch.randn_like(weight), alpha=0.1)
    theirs.save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    return theirs.eval()


def recipe_for(encoder: Path, **changes: Any) -> Recipe:
    return parse_recipe(
        {
            "tasks": {"mlm": {"like": "sst", **masked_row(**changes)}},
            "data": "embedded",
            "model": {"encoder": str(encoder), "max_tokens": 64},
        }
    )


@pytest.fixture(scope="module", params=["bert", "bert-relu", "mpnet"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Recipe]:
    folder = tmp_path_factory.mktemp("published")
    return published(request.param, folder), recipe_for(folder)


def dev_of(recipe: Recipe) -> Inputs:
    tokenizer, _, _ = new_model(recipe, CPU)
    return prepare(recipe, tokenizer, SAMPLE, ("dev",)).inputs["dev"]["mlm"]


def their_loss(theirs: Any, batch: Any, pad_id: int) -> Tensor:
    """Of the same masked input, padded, with -100 at what is not to be guessed."""
    ids, mask, segments = padded(batch.tokens, pad_id)
    wanted = np.full(len(batch.tokens.ids), -100)
    wanted[batch.parts[0].index[0]] = batch.parts[0].labels
    labels = torch.full(ids.shape, -100)
    labels[mask] = torch.from_numpy(wanted)
    segment = {} if theirs.config.model_type == "mpnet" else {"token_type_ids": segments}
    loss: Tensor = theirs(input_ids=ids, attention_mask=mask.long(), labels=labels, **segment).loss
    return loss


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_loss_and_gradients_are_those_of_transformers(pair: tuple[Any, Recipe], kernels: str) -> None:
    """The published layer is loaded; the token table has the gradient of both its uses."""
    theirs, recipe = pair
    _, model, _ = new_model(recipe, CPU)
    for part in (model.encoder, *model.encoder.modules()):
        if hasattr(part, "config"):
            object.__setattr__(part.config, "dropout", 0.0)
            object.__setattr__(part.config, "attention_dropout", 0.0)
    model.use("fp32", kernels=kernels).train()  # the layers of cpu_ops.py, for auto
    inputs = dev_of(recipe)
    batch = collate((Part("mlm", np.arange(24), 0),), {"mlm": inputs})
    outputs = model(ready(batch, model.encoder))["mlm"]
    assert outputs.shape == (batch.parts[0].rows, model.encoder.config.vocab_size)
    loss = build_loss(recipe.tasks[0])(outputs, torch.from_numpy(batch.parts[0].labels))
    theirs.zero_grad()
    expected = their_loss(theirs, batch, model.encoder.config.pad_id)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    head = model.heads["mlm"]
    assert isinstance(head, Vocabulary)
    named = dict(theirs.named_parameters())
    transform = "lm_head.dense" if "lm_head.dense.weight" in named else "cls.predictions.transform.dense"
    table = next(value for name, value in named.items() if name.endswith("word_embeddings.weight"))
    pairs = {
        "table": (model.encoder.embeddings.tokens.weight.grad, table.grad),
        "transform": (head.transform.weight.grad, named[f"{transform}.weight"].grad),
    }
    for name, (found, wanted) in pairs.items():
        assert found is not None
        scale = wanted.abs().max()
        torch.testing.assert_close(found / scale, wanted / scale, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_the_tables_gradient_is_the_sum_of_its_two_uses(
    kernels: str, tmp_path: Path, tiny_encoder: Path, small_data: Path
) -> None:
    """Against the same computation with a copy of the table in each place."""
    recipe = small_recipe(tiny_encoder, "sst", tasks={"sst": {"kind": "masked"}}, model={"encoder_dropout": 0.0})
    tokenizer, model, _ = new_model(recipe, CPU)
    inputs = prepare(recipe, tokenizer, small_data).inputs["train"]
    batch = ready(collate((Part("sst", np.arange(12), 0),), inputs), model.encoder)
    model.use("fp32", kernels=kernels).train()
    step = TrainStep(recipe, model, rule=add_gradients, precision="fp32")
    step.gradient(batch)
    table = model.encoder.embeddings.tokens.weight
    found = table.grad
    model.zero_grad(set_to_none=True)

    outer = table.detach().clone().requires_grad_()
    hidden = model.runner(batch.packed, ["tokens"])["tokens"].index_select(0, batch.parts[0].index[0])
    head = model.heads["sst"]
    inner = F.layer_norm(F.gelu(F.linear(hidden, head.transform.weight, head.transform.bias)), [32], head.norm.weight, head.norm.bias, 1e-12)  # fmt: skip
    F.cross_entropy(inner @ outer.T + head.bias, batch.parts[0].labels.long()).backward()
    assert table.grad is not None
    assert outer.grad is not None
    assert table.grad.abs().max() > 1e-6
    assert outer.grad.abs().max() > 1e-6
    torch.testing.assert_close(found, table.grad + outer.grad, rtol=1e-4, atol=1e-7)


def test_scores_are_those_of_transformers(pair: tuple[Any, Recipe]) -> None:
    """Right guesses and losses of each dev row."""
    theirs, recipe = pair
    _, model, _ = new_model(recipe, CPU)
    inputs = dev_of(recipe)
    found = outputs_of(model.eval(), inputs)
    hidden = inputs.hidden
    expected = np.zeros_like(found)
    segment = {} if theirs.config.model_type == "mpnet" else {"token_type_ids": None}
    for row in range(len(inputs)):
        span = slice(hidden.tokens.offsets[row], hidden.tokens.offsets[row + 1])
        ids = torch.from_numpy(hidden.tokens.ids[span].astype(np.int64))[None]
        with torch.no_grad():
            logits = theirs(input_ids=ids, attention_mask=torch.ones_like(ids), **segment).logits[0]
        wanted, mine = torch.from_numpy(hidden.ids[span].astype(np.int64)), torch.from_numpy(hidden.guessed[span])
        if mine.any():
            expected[row, 0] = (logits[mine].argmax(-1) == wanted[mine]).sum()
            expected[row, 1] = F.cross_entropy(logits[mine], wanted[mine], reduction="sum")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert quick_scores(model, {"mlm": inputs}) == {
        "mlm": pytest.approx(expected[:, 0].sum() / labels_of(inputs).sum())
    }


def test_a_published_layer_is_loaded_in_every_dress(tmp_path: Path) -> None:
    """TensorFlow's names, a bias at the decoder; without the layer it is fresh, and damage is said."""
    theirs = published("bert", tmp_path / "one")
    recipe = recipe_for(tmp_path / "one")
    state = new_model(recipe, CPU)[1].heads["mlm"].state_dict()
    assert torch.equal(state["transform.weight"], theirs.cls.predictions.transform.dense.weight)
    assert torch.equal(state["bias"], theirs.cls.predictions.bias)
    weights = load_file(tmp_path / "one" / "model.safetensors")

    def again(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, Tensor]:
        shutil.rmtree(tmp_path / "two", ignore_errors=True)
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        save_file(change(dict(weights)), tmp_path / "two" / "model.safetensors")
        return new_model(recipe_for(tmp_path / "two"), CPU)[1].heads["mlm"].state_dict()

    def old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma")
            .replace("LayerNorm.bias", "LayerNorm.beta")
            .replace("cls.predictions.bias", "cls.predictions.decoder.bias"): value
            for name, value in tensors.items()
        }
        return {name: value.clone() for name, value in renamed.items()}

    for name, value in again(old_names).items():
        assert torch.equal(value, state[name]), name
    bare = again(lambda tensors: {name: value for name, value in tensors.items() if "cls." not in name})
    assert not torch.equal(bare["transform.weight"], state["transform.weight"])
    assert not bare["bias"].any()
    with pytest.raises(MinbertError, match=r"transform\.weight of the prediction layer has shape \(3, 3\)"):
        again(lambda tensors: tensors | {"cls.predictions.transform.dense.weight": torch.zeros(3, 3)})
    with pytest.raises(MinbertError, match=r"its prediction layer has no norm\.bias"):
        again(lambda t: {name: value for name, value in t.items() if not name.endswith("transform.LayerNorm.bias")})


def test_in_one_step_with_a_task_that_reads_the_first_token(tiny_encoder: Path, small_data: Path) -> None:
    """The shortcut that computes only first tokens must be off, and each task has what it has alone."""
    recipe = small_recipe(tiny_encoder, "sst", "sts", tasks={"sts": {"kind": "masked"}}, sampler={"kind": "all"})
    tokenizer, model, _ = new_model(recipe, CPU)
    data = prepare(recipe, tokenizer, small_data).inputs["train"]
    parts = Part("sst", np.arange(5), 0), Part("sts", np.arange(6), 0)
    model.eval()
    together = model(ready(collate(parts, data), model.encoder))
    for part in parts:
        alone = model(ready(collate((part,), data), model.encoder))
        torch.testing.assert_close(together[part.task], alone[part.task], rtol=1e-4, atol=1e-5)


def test_a_batch_without_a_token_to_guess_costs_nothing(tiny_encoder: Path, small_data: Path) -> None:
    recipe = small_recipe(tiny_encoder, "sst", tasks={"sst": {"kind": "masked"}})
    tokenizer, model, _ = new_model(recipe, CPU)
    task = recipe.tasks[0]
    tokens = tokenizer.encode(["\u4e00", "\u4e00\u4e8c"])  # unknown words alone
    inputs = Inputs(task, (tokens,), None, Truncation(), Masking.of(task, tokenizer, seed=1, place=0))
    step = TrainStep(recipe, model, rule=add_gradients, precision="fp32")
    step.gradient(ready(collate((Part("sst", np.arange(2), 0),), {"sst": inputs}), model.encoder))
    assert step.totals.tolist() == [[0.0, 0.0]]
    assert np.isnan(quick_scores(model.eval(), {"sst": inputs})["sst"])


# --- recipes and runs -----------------------------------------------------------------------------------------------


def test_a_masked_task_is_like_another_without_its_labels() -> None:
    rows = {name: {"like": name.split("-")[0], "kind": "masked"} for name in ("sst-mlm", "quora-mlm")}
    sst, quora = parse_recipe({"tasks": rows}).tasks
    assert (sst.label, sst.classes, sst.loss, sst.metric_name) == ("", (), "masked-lm", "masked-accuracy")
    assert (sst.views, quora.views) == (("first",), ("joint",)), "a pair is one input"
    assert (sst.mask_rate, sst.whole_words) == (0.15, False)
    again = parse_recipe(as_dict(parse_recipe({"tasks": rows})))
    assert again.tasks == (sst, quora)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"classes": ["a", "b"]}, "classes has 2 names; a masked task has none"),
        ({"label": "sentiment"}, 'label is "sentiment"; a masked task has none'),
        ({"head": "mlp"}, 'head is "mlp"; a masked task has its own'),
        ({"pooling": "mean"}, 'pooling is "mean"; a masked task reads the tokens'),
        ({"mask_rate": 0.0}, "mask_rate is 0.0; expected more than 0 and at most 1"),
        ({"loss": "mse"}, 'loss is "mse", which is not for masked; expected masked-lm'),
        ({"metric": "accuracy"}, 'metric is "accuracy"'),
        (
            {"kind": "classification", "classes": ["a", "b"], "mask_rate": 0.3},
            "mask_rate is 0.3; a classification task",
        ),
        ({"kind": "regression", "whole_words": True}, "whole_words is True; a regression task hides no tokens"),
        ({"kind": "regression", "loss": "masked-lm"}, 'loss is "masked-lm", which is not for regression'),
    ],
)
def test_what_a_masked_task_is_not(row: dict[str, Any], message: str) -> None:
    with pytest.raises(MinbertError, match=message):
        parse_recipe({"tasks": {"mlm": masked_row(**row)}})


def masked_recipe(encoder: Path, **training: Any) -> Recipe:
    """Two masked tasks before sentiment, whose head is fresh: 4 steps and 2."""
    files = {"train": "paraphrase-train.tsv", "dev": "paraphrase-dev.tsv", "test": []}
    both = {
        "sst": {"kind": "masked", "train": "sentiment-train.tsv", "dev": "sentiment-dev.tsv", "test": []},
        "quora": {"kind": "masked", "whole_words": True, "mask_rate": 0.3, **files},
    }
    brief = {"epochs": 1, "batch_size": 12, "best": "last", "train_sample": 6, **training}
    stage = {"name": "mlm", "tasks": both, "training": brief, "optimizer": {"lr": 1e-3}}
    return small_recipe(encoder, "sst", stages=[stage], training={"epochs": 1, "batch_size": 12})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path, small_data: Path) -> Run:
    """Masked-language modelling, then sentiment. To be read only."""
    out = tmp_path_factory.mktemp("masked") / "run"
    return train(masked_recipe(tiny_encoder), out=out, data=small_data, device="cpu")


def test_a_masked_stage_is_scored_by_accuracy_and_perplexity(finished: Run) -> None:
    found = finished.results["stages"]["mlm"]["dev"]["sst"]
    assert found["metric"] == "masked-accuracy"
    assert list(found["metrics"]) == ["masked-accuracy", "perplexity"]
    rows = read_predictions(finished.folder / "stages" / "1-mlm", "sst").rows
    hidden, right, loss = (sum(row[key] for row in rows) for key in ("label", "prediction", "loss"))
    assert found["metrics"]["masked-accuracy"]["value"] == pytest.approx(right / hidden)
    assert found["metrics"]["perplexity"]["value"] == pytest.approx(np.exp(loss / hidden), rel=1e-4)
    stage = read_results(finished.folder / "stages" / "1-mlm")
    assert stage["masked_layers"] == {"sst": "fresh", "quora": "fresh"}
    assert stage["rows"] == 48, "texts, not tokens"
    assert finished.results["masked_layers"] == {}
    assert set(finished.results["dev"]) == {"sst"}


def test_it_learns(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """Perplexity falls far below that of guessing among all words alike."""
    recipe = small_recipe(
        tiny_encoder,
        "sst",
        tasks={"sst": {"kind": "masked"}},
        optimizer={"lr": 3e-3},
        training={"epochs": 30, "train_sample": 0, "best": "last", "evaluate_every": 90},
    )
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    vocabulary = len((tiny_encoder / "vocab.txt").read_text().splitlines())
    assert run.results["dev"]["sst"]["metrics"]["perplexity"]["value"] < vocabulary / 3


@pytest.mark.parametrize(
    "stops",
    [
        [{"at_step": 1, "part": "mlm"}],
        [{"at_step": 3, "part": "mlm"}, {"at_step": 4, "part": "mlm"}],
        [{"at_part": "small"}, {"at_step": 1, "part": "small"}],
    ],
    ids=["early", "twice", "after"],
)
def test_masks_are_the_same_after_a_stop(
    stops: list[dict[str, Any]], tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe = masked_recipe(tiny_encoder, checkpoint_every=1, epochs=2)
    train(recipe, out=tmp_path / "whole", data=small_data, device="cpu")
    run = tmp_path / "run"
    for stop in stops:
        with pytest.raises(Stopped):
            train(recipe, out=run, data=small_data, device="cpu", resume=run.exists(), watcher=Listener(**stop))
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, tmp_path / "whole") == []


def test_a_masked_model_is_evaluated_as_it_was(finished: Run, small_data: Path) -> None:
    stage = finished.folder / "stages" / "1-mlm"
    found = evaluate_model(stage / "model", data=small_data, device="cpu")
    for name, one in found.items():
        assert one.score == pytest.approx(read_results(stage)["dev"][name]["metrics"]["masked-accuracy"]["value"])


def test_a_masked_model_has_nothing_to_predict(finished: Run, small_data: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(finished.folder / "stages" / "1-mlm" / "model")
    with pytest.raises(MinbertError, match="sst, quora: a masked task trains the encoder and has nothing to predict"):
        predictor.predict(["a text"])
    with pytest.raises(MinbertError, match="quora: a masked task"):
        predictor.predict(["a text"], ["another"], tasks=["quora"])
    with pytest.raises(MinbertError, match="sst, quora: a masked task"):
        predict_file(predictor, small_data / "sentiment-dev.tsv", tmp_path / "out.csv")
    with pytest.raises(MinbertError, match="sst: a masked task"):
        predict_file(predictor, small_data / "sentiment-dev.tsv", tmp_path / "out.csv", tasks=["sst"])
    assert predictor.embed(["a text"]).shape == (1, 32)


def test_masked_beside_another_task_is_left_out_of_predictions(
    tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    mlm = {"like": "sst", "kind": "masked", "train": "sentiment-train.tsv", "dev": "sentiment-dev.tsv", "test": []}
    recipe = small_recipe(tiny_encoder, "sst", training={"epochs": 1}, sampler={"kind": "all"})
    recipe = parse_recipe({**as_dict(recipe), "tasks": {**as_dict(recipe)["tasks"], "mlm": mlm}})
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    assert list(run.results["overall"]) == ["2023", "2024"]
    assert list(Predictor.load(run.model).predict(["a text"])) == ["sst"]
    report = predict_file(Predictor.load(run.model), small_data / "sentiment-dev.tsv", tmp_path / "out.csv")
    assert report.tasks == ("sst",)


def test_masked_runs_are_compared_and_reported(
    finished: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    """Two seeds guess the same tokens."""
    from dataclasses import replace

    stage = finished.folder / "stages" / "1-mlm"
    other = train(
        replace(masked_recipe(tiny_encoder).stages[0], seed=2), out=tmp_path / "b", data=small_data, device="cpu"
    )
    found = compare_runs(stage, other.folder, rng=np.random.default_rng(0), samples=50)
    assert set(found) == {"sst", "quora"}
    write_report([stage, other.folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "perplexity" in page
    assert "masked-accuracy" in page


def test_a_run_says_where_its_prediction_layer_is_from(tmp_path: Path, small_data: Path) -> None:
    class Told(Listener):
        notes: list[str]

        def preparing(self, what: str) -> None: ...
        def prepared(self, note: str) -> None:
            self.notes = [*getattr(self, "notes", []), note]

    published("bert", tmp_path / "bert")
    recipe = small_recipe(tmp_path / "bert", "sst", tasks={"sst": {"kind": "masked"}}, training={"epochs": 1})
    told = Told()
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu", watcher=told)
    assert run.results["masked_layers"] == {"sst": "published"}
    assert "prediction layer of masked tasks: sst published" in told.notes
    assert json.loads((run.folder / "results.json").read_text())["masked_layers"] == {"sst": "published"}


def test_low_precision_products_are_near(tiny_encoder: Path, small_data: Path) -> None:
    recipe = small_recipe(tiny_encoder, "sst", tasks={"sst": {"kind": "masked"}})
    tokenizer, model, _ = new_model(recipe, CPU)
    inputs = prepare(recipe, tokenizer, small_data).inputs["dev"]["sst"]

    def losses(model: MultitaskModel) -> NDArray[np.float32]:
        return outputs_of(model.eval(), inputs)[:, 1]

    exact = losses(model.use("fp32"))
    np.testing.assert_allclose(losses(model.use("bf16")), exact, rtol=0.02, atol=0.02)


def test_plain_text_is_a_sentence_a_line(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("one two\n\nthree\n", encoding="utf-8")
    task = check_task(Task("t", "masked", ("s.txt",), dev=("s.txt",), label=""))
    assert read_split(task, "train", tmp_path).texts == ["one two", "three"]
