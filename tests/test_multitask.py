"""One encoder, several heads: tasks in one batch do not disturb each other, and a batch is laid out as it says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from minbert.data.inputs import Batch, Inputs, collate, tokenize, tokenize_view
from minbert.data.raw import Examples
from minbert.data.streams import Part
from minbert.data.tokenizer import Tokenizer
from minbert.errors import MinbertError
from minbert.model import multitask
from minbert.model.encoder import POOLINGS, Pooling, pool
from minbert.model.heads import BothOrders
from minbert.model.multitask import MultitaskModel, answer_pooled, encode_pooled, outputs_of, ready
from minbert.model.packed import Packed
from minbert.tasks import HEADS, PoolingName
from minbert.training.losses import build_loss
from tests.models import PAIRS, TEXTS, THREE, make

# One task of each way to read a row, so that a batch holds one, two and three kinds of views.
MIXED: dict[str, dict[str, Any]] = {
    "sst": {},
    "quora": {"head": "interaction"},
    "sts": {"head": "dph"},
    "joint": {"like": "quora", "head": "mlp", "loss": "cross-entropy"},
}


def inputs_for(tokenizer: Tokenizer, model: MultitaskModel) -> dict[str, Inputs]:
    """The same rows for every task; labels 0, 1, 2, ... tell them apart."""
    data = {}
    for name, task in model.tasks.items():
        labels = np.arange(len(TEXTS), dtype=np.float64)
        examples = Examples([str(row) for row in range(len(TEXTS))], TEXTS, PAIRS if task.is_pair else None, labels)
        data[name] = tokenize(task, examples, tokenizer, 64)
    return data


def step(**rows: list[int]) -> tuple[Part, ...]:
    return tuple(Part(task, np.array(numbers)) for task, numbers in rows.items())


def say(model: MultitaskModel, batch: Batch) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return {task: outputs.numpy() for task, outputs in model(ready(batch, model.encoder)).items()}


@pytest.fixture(scope="module")
def made(tiny_encoder: Path) -> tuple[Tokenizer, MultitaskModel, dict[str, Inputs]]:
    tokenizer, model, _ = make(tiny_encoder, MIXED)
    return tokenizer, model, inputs_for(tokenizer, model)


Made = tuple[Tokenizer, MultitaskModel, dict[str, Inputs]]

# --- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_lies_as_its_parts_say(made: Made) -> None:
    _, _, data = made
    rows = {"sts": [4, 0, 2], "sst": [1], "quora": [3, 3]}
    batch = collate(step(**rows), data)
    assert [(part.task, part.index.shape, part.rows) for part in batch.parts] == [
        ("sts", (2, 3), 3),
        ("sst", (1, 1), 1),
        ("quora", (2, 2), 2),
    ]
    assert [part.labels.tolist() for part in batch.parts] == [[4, 0, 2], [1], [3, 3]]
    assert all(part.labels.dtype == np.float32 for part in batch.parts)
    assert batch.rows == 6
    assert len(batch.tokens) == 11
    places = np.concatenate([part.index.ravel() for part in batch.parts])
    assert sorted(places.tolist()) == list(range(11)), "each sequence is one view of one row"
    for part in batch.parts:
        for view, where in enumerate(part.index):
            for place, row in zip(where, rows[part.task], strict=True):
                for found, given in zip(batch.tokens[place], data[part.task].views[view][row], strict=True):
                    assert found.tolist() == given.tolist()


def test_a_batch_is_sorted_by_length_and_has_no_padding(made: Made) -> None:
    _, _, data = made
    batch = collate(step(quora=[3, 1], sst=[1]), data)
    quora, sst = data["quora"].views, data["sst"].views
    lengths = [len(quora[0][3][0]), len(quora[1][3][0]), len(quora[0][1][0]), len(quora[1][1][0]), len(sst[0][1][0])]
    assert len(set(lengths)) > 1
    assert batch.tokens.lengths.tolist() == sorted(lengths)
    assert len(batch.tokens.ids) == len(batch.tokens.segments) == sum(lengths)


def test_equal_sequences_keep_their_order(made: Made) -> None:
    """So that a batch depends on its step alone."""
    _, _, data = made
    batch = collate(step(sst=[0, 1], joint=[0, 0, 0]), data)
    joint = batch.parts[1].index[0]
    assert joint.tolist() == list(range(joint[0], joint[0] + 3))


def test_what_a_view_reads(made: Made) -> None:
    tokenizer, _, _ = made

    def words(view: Any) -> list[str]:
        return tokenizer.words(tokenize_view(view, tokenizer, ["nice"], ["the sun"], 64)[0][0])

    assert words("first") == ["[CLS]", "nice", "[SEP]"]
    assert words("second") == ["[CLS]", "the", "sun", "[SEP]"]
    assert words("joint") == ["[CLS]", "nice", "[SEP]", "the", "sun", "[SEP]"]
    assert words("reversed") == ["[CLS]", "the", "sun", "[SEP]", "nice", "[SEP]"]


def test_rows_without_labels_are_batched_too(made: Made) -> None:
    tokenizer, model, _ = made
    inputs = tokenize(model.tasks["sst"], Examples(["0"], TEXTS[:1], None, None), tokenizer, 64)
    batch = collate(step(sst=[0]), {"sst": inputs})
    assert batch.parts[0].labels.shape == (0,)
    assert say(model, batch)["sst"].shape == (1, 5)


def test_a_row_costs_its_longest_view_and_cuts_are_counted_in_every_view(made: Made) -> None:
    tokenizer, model, data = made
    assert data["quora"].lengths.tolist() == np.maximum(*(view.lengths for view in data["quora"].views)).tolist()
    short = tokenize(model.tasks["sts"], Examples(["0"], TEXTS[3:4], PAIRS[3:4], None), tokenizer, 8)
    assert short.truncation.texts == 2  # the pair in both orders
    assert short.lengths.tolist() == [8]


def test_chosen_rows_keep_their_labels(made: Made) -> None:
    _, _, data = made
    some = data["sts"].take(np.array([3, 1]))
    assert len(some) == 2
    assert some.labels is not None
    assert some.labels.tolist() == [3, 1]
    assert [some.views[1][0][0].tolist(), some.views[0][1][0].tolist()] == [
        data["sts"].views[1][3][0].tolist(),
        data["sts"].views[0][1][0].tolist(),
    ]


def test_a_batch_on_its_device_is_the_batch(made: Made) -> None:
    _, model, data = made
    batch = collate(step(sst=[1, 0], sts=[2, 4]), data)
    moved = ready(batch, model.encoder)
    assert moved.packed.ids.tolist() == batch.tokens.ids.tolist()
    assert moved.packed.segments.tolist() == batch.tokens.segments.tolist()
    assert moved.packed.offsets.tolist() == batch.tokens.offsets.tolist()
    for found, given in zip(moved.parts, batch.parts, strict=True):
        assert found.task == given.task
        assert found.index.tolist() == given.index.tolist()
        assert found.labels.tolist() == given.labels.tolist()


# --- several tasks at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("common", [False, True])
def test_tasks_in_one_batch_say_what_each_says_alone(tiny_encoder: Path, common: bool) -> None:
    tasks = {name: row | ({"pooling": "mean"} if name == "sts" else {}) for name, row in MIXED.items()}
    tokenizer, model, _ = make(tiny_encoder, tasks, common_layer=common)
    data = inputs_for(tokenizer, model)
    rows = {"quora": [0, 3, 1], "sst": [1], "joint": [2, 0], "sts": [4, 3, 2, 1]}
    together = say(model, collate(step(**rows), data))
    assert list(together) == list(rows)
    for task, numbers in rows.items():
        alone = say(model, collate(step(**{task: numbers}), data))
        np.testing.assert_allclose(together[task], alone[task], atol=1e-5)
        for place, number in enumerate(numbers):
            single = say(model, collate(step(**{task: [number]}), data))[task]
            np.testing.assert_allclose(together[task][place : place + 1], single, atol=1e-5)


def test_the_encoder_runs_once_a_batch(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, data = made
    calls: list[int] = []
    packed = model.encoder.packed

    def note(batch: Packed, **options: Any) -> torch.Tensor:
        calls.append(len(batch.ids))
        return packed(batch, **options)

    monkeypatch.setattr(model.encoder, "packed", note)
    batch = collate(step(sst=[0, 1], quora=[2], sts=[3]), data)
    say(model, batch)
    assert calls == [len(batch.tokens.ids)]


@pytest.mark.parametrize("head", [name for name, row in HEADS.items() if not row.only_contrastive])
def test_a_split_is_answered_as_a_batch_is(tiny_encoder: Path, head: str) -> None:
    tokenizer, model, _ = make(tiny_encoder, {"sts": {"head": head, "pooling": "mean"}}, common_layer=True)
    data = inputs_for(tokenizer, model)
    batch = collate(step(sts=list(range(len(TEXTS)))), data)
    found = outputs_of(model, data["sts"])
    assert found.dtype == np.float32
    assert found.shape == (len(TEXTS), 1)
    np.testing.assert_allclose(found, say(model, batch)["sts"], atol=1e-5)


def test_a_heads_outputs_from_vectors_are_those_of_the_model(made: Made) -> None:
    _, model, data = made
    views = [encode_pooled(model.runner, view, ["cls"])["cls"] for view in data["sts"].views]
    np.testing.assert_array_equal(answer_pooled(model, "sts", views), outputs_of(model, data["sts"]))


# --- pooling --------------------------------------------------------------------------------------------------------


def test_each_task_has_its_own_pooling_or_the_models(tiny_encoder: Path) -> None:
    tasks = {f"with-{how}": {"like": "sst", "pooling": how} for how in POOLINGS} | {"sst": {}}
    tokenizer, model, _ = make(tiny_encoder, tasks, pooling="max")
    assert model.poolings == {f"with-{how}": how for how in POOLINGS} | {"sst": "max"}
    data = inputs_for(tokenizer, model)
    batch = collate(step(**{name: [0, 1, 2] for name in tasks}), data)
    found = say(model, batch)
    tokens = data["sst"].views[0]
    for name, how in model.poolings.items():
        for row in range(3):
            ids = torch.from_numpy(tokens[row][0].astype(np.int64))[None]
            with torch.no_grad():
                vector = pool(model.encoder(ids), None, how, model.encoder.pooler)
                expected = model.heads[name](vector)[0].numpy()
            np.testing.assert_allclose(found[name][row], expected, atol=1e-5)


def test_pooled_vectors_do_not_depend_on_the_order_or_the_batches(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, data = made
    tokens = data["quora"].views[0]
    whole = encode_pooled(model.runner, tokens, POOLINGS)
    assert list(whole) == list(POOLINGS)
    order = np.array([3, 0, 4, 1, 2])
    monkeypatch.setitem(multitask.TOKEN_BUDGET, "cpu", 20)  # several batches, some of a single row
    seen: list[int] = []
    pieces = encode_pooled(model.runner, tokens.take(order), POOLINGS, progress=seen.append)
    assert len(seen) > 2
    assert sum(seen) == len(order)
    for how in POOLINGS:
        assert whole[how].shape == (len(tokens), 32)
        assert whole[how].dtype == np.float32
        np.testing.assert_allclose(pieces[how], whole[how][order], atol=1e-5)
    assert np.abs(whole["cls"] - whole["mean"]).max() > 0.1


def test_nothing_is_encoded_to_nothing(made: Made) -> None:
    _, model, data = made
    assert encode_pooled(model.runner, data["sst"].views[0].take([]), ["mean"])["mean"].shape == (0, 32)


# --- the common layer -----------------------------------------------------------------------------------------------


def test_the_common_layer_comes_first_in_every_head(tiny_encoder: Path) -> None:
    tokenizer, model, _ = make(tiny_encoder, MIXED, common_layer=True)
    assert make(tiny_encoder, MIXED)[1].common is None
    assert isinstance(model.common, nn.Sequential)
    seen: list[tuple[int, ...]] = []
    model.common.register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape)))
    data = inputs_for(tokenizer, model)
    say(model, collate(step(sst=[0], quora=[1, 2], sts=[3], joint=[4]), data))
    # One module for each view of each task; the branches of sts are the two orders and their difference.
    assert seen == [(1, 32), (2, 32), (2, 32), (1, 32), (1, 32), (1, 32), (1, 32)]

    one, other = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)).unbind()
    layer = model.common[0]

    def through(vector: torch.Tensor) -> torch.Tensor:
        return torch.tanh(vector @ layer.weight.T + layer.bias)

    torch.testing.assert_close(model.answer("sst", one), model.heads["sst"](through(one)))
    torch.testing.assert_close(model.answer("quora", one, other), model.heads["quora"](through(one), through(other)))
    head = model.heads["sts"]
    assert isinstance(head, BothOrders)
    logits = [branch(through(view)) for branch, view in zip(head.branches, (one, other, one - other), strict=True)]
    torch.testing.assert_close(model.answer("sts", one, other), head.out(torch.cat(logits, dim=-1)))


@pytest.mark.parametrize("head", ["linear", "difference", "interaction", "projected-dot", "dpha"])
def test_a_heads_dropout_is_before_the_common_layer_and_not_behind_it(tiny_encoder: Path, head: str) -> None:
    """In the common layer it is an experiment of its own."""
    _, model, _ = make(tiny_encoder, {"sts": {"head": head}}, common_layer=True, dropout=0.5)
    assert model.common is not None
    given: list[torch.Tensor] = []
    model.common.register_forward_hook(lambda _, args, __: given.append(args[0]))
    ones = [torch.ones(50, 32)] * len(model.tasks["sts"].views)
    model.train()
    torch.manual_seed(0)
    model.answer("sts", *ones)
    assert all(set(view.unique().tolist()) == {0.0, 2.0} for view in given[:2])
    assert not any(view.any() for view in given[2:]), "the difference of equal embeddings is 0, whatever is dropped"
    nothing = [torch.zeros(50, 32)] * len(ones)  # which no dropout changes before the layer
    assert torch.equal(model.answer("sts", *nothing), model.answer("sts", *nothing))


def test_the_common_layer_of_some_tasks_is_not_in_the_others(tiny_encoder: Path) -> None:
    """Gulluk's future work: a last layer that paraphrase and similarity share, and sentiment does not."""
    tokenizer, model, manifest = make(tiny_encoder, THREE, common_layer=True, common_tasks=["quora", "sts"])
    assert model.common is not None and manifest.model.common_tasks == ("quora", "sts")
    vector = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.answer("sst", vector), model.heads["sst"](vector))
    torch.testing.assert_close(model.answer("quora", vector), model.heads["quora"](model.common(vector)))
    data = inputs_for(tokenizer, model)
    for rows, expected in (({"sst": [0, 1]}, set()), ({"sst": [0], "sts": [1]}, {"common"})):
        model.zero_grad()
        outputs = model(ready(collate(step(**rows), data), model.encoder))
        sum(values.sum() for values in outputs.values()).backward()  # type: ignore[union-attr]
        assert touched(model, ["common"]) == expected


def test_the_common_layer_is_not_in_a_masked_task(tiny_encoder: Path) -> None:
    tasks = {"sst": {}, "hidden": {"kind": "masked", "train": "a.tsv", "text": "a"}}
    _, model, _ = make(tiny_encoder, tasks, common_layer=True)
    tokens = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    expected = model.heads["hidden"](tokens, model.encoder.embeddings.tokens.weight)
    torch.testing.assert_close(model.answer("hidden", tokens), expected)


def test_the_common_layer_has_a_dropout_of_its_own(tiny_encoder: Path) -> None:
    _, model, _ = make(tiny_encoder, {"sst": {}}, common_layer=True, common_dropout=0.5, dropout=0.0)
    vector = torch.ones(1, 32)
    assert torch.equal(model.answer("sst", vector), model.answer("sst", vector))
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(model.answer("sst", vector), model.answer("sst", vector))


def touched(model: MultitaskModel, names: Iterable[str]) -> set[str]:
    """Which of the parts, by the start of their name, have a gradient."""
    return {
        start
        for start in names
        for name, weight in model.named_parameters()
        if name.startswith(start) and weight.grad is not None and weight.grad.abs().sum() > 0
    }


@pytest.mark.parametrize("task", MIXED)
def test_a_tasks_gradient_leaves_the_other_heads_alone(tiny_encoder: Path, task: str) -> None:
    tokenizer, model, _ = make(tiny_encoder, MIXED, common_layer=True)
    data = inputs_for(tokenizer, model)
    batch = collate(step(sst=[0, 1], quora=[1, 0], sts=[0, 1], joint=[0, 1]), data)
    part = next(part for part in batch.parts if part.task == task)
    build_loss(model.tasks[task])(model(ready(batch, model.encoder))[task], torch.from_numpy(part.labels)).backward()
    parts = [f"heads.{name}." for name in MIXED] + ["common.", "encoder.layers.0.", "encoder.embeddings."]
    assert touched(model, parts) == {f"heads.{task}.", "common.", "encoder.layers.0.", "encoder.embeddings."}


# --- building -------------------------------------------------------------------------------------------------------


def test_fresh_heads_come_from_the_seed_alone(tiny_encoder: Path) -> None:
    torch.manual_seed(1)
    one = make(tiny_encoder, seed=3)[1].state_dict()
    torch.manual_seed(2)
    same, other = make(tiny_encoder, seed=3)[1].state_dict(), make(tiny_encoder, seed=4)[1].state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["heads.sst.out.weight"], other["heads.sst.out.weight"])


@pytest.mark.parametrize("name", ["a.b", "type", "keys", "training"])
def test_a_task_whose_name_torch_cannot_use_is_refused(tiny_encoder: Path, name: str) -> None:
    with pytest.raises(MinbertError, match=f'a task is named "{name}"; expected'):
        make(tiny_encoder, {name: {"like": "sst"}})


def test_poolings_are_those_of_the_encoder() -> None:
    assert get_args(PoolingName) == (*POOLINGS, "weighted")
    assert get_args(Pooling) == (*POOLINGS, "weighted", "tokens"), "which no task asks for by name"
