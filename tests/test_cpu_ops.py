"""Training on a CPU: the layers written out against the plain ones, masks against what chance would do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from minbert.data.tokenizer import Tokens
from minbert.model import runner as runners
from minbert.model.cpu_ops import ACTIVATIONS, Table, dropout, keep_mask, train_layer
from minbert.model.encoder import POOLINGS, Encoder, EncoderConfig, Layer, Pooling, by_run, pool
from minbert.model.packed import Packed, Runs, pack
from minbert.model.runner import CpuRunner, PlainRunner, make_runner

BERT = EncoderConfig(
    vocab_size=50, width=16, layers=3, heads=4, feed_forward=24, positions=50, dropout=0.0, attention_dropout=0.0
)
MPNET = replace(BERT, kind="mpnet", segments=0, relative_buckets=8, pad_id=1)
SHAPES = {"bert": BERT, "mpnet": MPNET}
LENGTHS = [1, 1, 3, 5, 5, 9, 40]
SAME = 1e-5  # relative to the largest number of a tensor


def encoder_of(config: EncoderConfig, seed: int = 0) -> Encoder:
    """In training mode, no bias at 0 and no norm at 1."""
    encoder = Encoder(config, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    return encoder.train()


def batch_of(config: EncoderConfig, lengths: list[int] = LENGTHS) -> Packed:
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, config.vocab_size, offsets[-1]).astype(np.int32)
    return pack(Tokens(ids, rng.integers(0, 2, offsets[-1]).astype(np.uint8), offsets), config, torch.device("cpu"))


def gradients(encoder: Encoder, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What comes out, and the gradients of a random weighing of it."""
    encoder.zero_grad()
    found = run()
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (found * weights).sum().backward()  # type: ignore[no-untyped-call]
    kept = {name: value.grad for name, value in encoder.named_parameters() if value.grad is not None}
    return found.detach(), {name: grad.clone() for name, grad in kept.items()}


def assert_same(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert ours[1].keys() == theirs[1].keys()
    for name, found, expected in [
        ("output", ours[0], theirs[0]),
        *((name, grad, theirs[1][name]) for name, grad in ours[1].items()),
    ]:
        largest = float(expected.abs().max())
        assert float((found - expected).abs().max()) <= SAME * largest, name


# --- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", SHAPES)
def test_a_written_out_layer_is_the_plain_one(kind: str, activation: str) -> None:
    config = replace(SHAPES[kind], activation=activation)
    encoder, batch = encoder_of(config), batch_of(config)
    plain = gradients(encoder, lambda: encoder.packed(batch))
    assert_same(gradients(encoder, lambda: encoder.packed(batch, run=train_layer)), plain)


@pytest.mark.parametrize("run", [None, train_layer])
@pytest.mark.parametrize("kind", SHAPES)
def test_the_first_tokens_alone_are_those_of_all(kind: str, run: runners.RunLayer | None) -> None:
    """Gradients too: the bias of the keys has one of 0, and none is missing."""
    config = SHAPES[kind]
    encoder, batch = encoder_of(config), batch_of(config)
    starts = batch.offsets[:-1]
    whole = gradients(encoder, lambda: encoder.packed(batch)[starts])
    assert_same(gradients(encoder, lambda: encoder.packed(batch, only_first=True, run=run)), whole)


def test_an_encoder_of_one_layer_can_compute_first_tokens_alone() -> None:
    config = replace(BERT, layers=1)
    encoder, batch = encoder_of(config), batch_of(config)
    whole = encoder.packed(batch)[batch.offsets[:-1]]
    torch.testing.assert_close(encoder.packed(batch, only_first=True, run=train_layer), whole)


def test_what_does_not_learn_has_no_gradient() -> None:
    encoder, batch = encoder_of(BERT), batch_of(BERT)
    encoder.requires_grad_(False)
    for part in (encoder.layers[1].attention.out, encoder.layers[1].feed_forward.norm, encoder.layers[2]):
        part.requires_grad_(True)  # type: ignore[union-attr]
    plain = gradients(encoder, lambda: encoder.packed(batch))
    assert_same(gradients(encoder, lambda: encoder.packed(batch, run=train_layer)), plain)


def naive(layer: Layer, x: Tensor, runs: Runs, bias: Tensor | None, rate: float) -> Tensor:
    """A layer as the paper has it, its masks drawn in the order of `train_layer`."""
    attention, feed_forward = layer.attention, layer.feed_forward
    found = []
    for rows in by_run(attention.qkv(x), runs):
        heads = attention.config.heads
        query, key, value = rows.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if bias is not None:
            scores = scores + bias[:, :, : rows.shape[1], : rows.shape[1]]
        shares = scores.softmax(-1)
        shares = shares * keep_mask(shares.flatten(0, 1).shape, rate, x.dtype).view_as(shares)
        found.append((shares @ value).transpose(1, 2).reshape(-1, x.shape[1]))
    x = attention.norm(x + attention.out(torch.cat(found)) * keep_mask(x.shape, rate, x.dtype))
    inner = nn.functional.gelu(feed_forward.up(x))
    return feed_forward.norm(x + feed_forward.down(inner) * keep_mask(x.shape, rate, x.dtype))


@pytest.mark.parametrize("kind", SHAPES)
def test_dropout_is_where_it_belongs_and_on_the_way_back_too(kind: str) -> None:
    rate = 0.3
    config = replace(SHAPES[kind], dropout=rate, attention_dropout=rate)
    encoder, batch = encoder_of(config), batch_of(config)

    def seeded(run: runners.RunLayer) -> Callable[[], Tensor]:
        def start() -> Tensor:
            torch.manual_seed(5)
            return encoder.packed(batch, run=run)

        return start

    def by_hand(layer: Layer, x: Tensor, runs: Runs, bias: Tensor | None) -> Tensor:
        return naive(layer, x, runs, bias, rate)

    expected = gradients(encoder, seeded(by_hand))
    found = gradients(encoder, seeded(train_layer))
    assert_same(found, expected)
    assert_same(gradients(encoder, seeded(train_layer)), found)  # the same seed, the same bits
    assert not torch.equal(encoder.packed(batch, run=train_layer), found[0])


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_a_mask_drops_at_its_rate(rate: float) -> None:
    torch.manual_seed(0)
    mask = keep_mask((1000, 1001), rate)
    count = mask.numel()
    dropped = (mask == 0).float()
    assert abs(float(dropped.mean()) - rate) < 4 * (rate * (1 - rate) / count) ** 0.5 + 2**-17
    assert len(mask.unique()) == 2
    assert float(mask.max()) == pytest.approx(1 / (1 - rate), rel=1e-3)
    assert float(mask.double().mean()) == pytest.approx(1, abs=4 * (rate / (1 - rate) / count) ** 0.5)


@pytest.mark.parametrize("apart", [1, 2, 3, 4, 5, 64, 1001])
def test_elements_are_dropped_independently(apart: int) -> None:
    """Those of one random number, which are neighbours, as well as others; in each place of the four."""
    rate = 0.1
    torch.manual_seed(1)
    dropped = (keep_mask((4_000_000,), rate) == 0).double()
    both = float((dropped[:-apart] * dropped[apart:]).mean())
    assert abs(both - rate**2) < 5 * (rate**2 / len(dropped)) ** 0.5
    for place in dropped.view(-1, 4).mean(0).tolist():
        assert abs(place - rate) < 4 * (rate * (1 - rate) / (len(dropped) / 4)) ** 0.5


def test_masks_follow_torchs_generator() -> None:
    """Whose state a checkpoint holds."""
    torch.manual_seed(3)
    first, state, second = keep_mask((7, 9), 0.5), torch.get_rng_state(), keep_mask((7, 9), 0.5)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(keep_mask((7, 9), 0.5), second)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4)])
def test_a_mask_has_any_shape(shape: tuple[int, ...]) -> None:
    assert keep_mask(shape, 0.2, torch.float64).shape == shape
    assert keep_mask(shape, 0.2, torch.float64).dtype == torch.float64


def test_rates_at_the_ends() -> None:
    assert torch.equal(keep_mask((100,), 1.0), torch.zeros(100))
    assert torch.equal(keep_mask((100,), 0.0), torch.ones(100))
    x = torch.randn(100)
    assert torch.equal(dropout(x, 0.0, training=True), x)
    assert torch.equal(dropout(x, 0.5, training=False), x)


def test_dropout_scales_what_it_keeps_and_its_gradient() -> None:
    torch.manual_seed(0)
    x = torch.full((50, 20), 3.0, requires_grad=True)
    found = dropout(x, 0.25, training=True)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(found, 3 * x.grad)
    assert set(found.detach().unique().tolist()) == {0.0, 4.0}


# --- the table ------------------------------------------------------------------------------------------------------


def look_up(table: nn.Embedding, ids: list[list[int]]) -> Tensor:
    """The table's gradient after one more batch."""
    found = table(torch.tensor(ids, dtype=torch.int32))
    (found * torch.arange(1.0, 1 + found.shape[-1])).sum().backward()
    assert table.weight.grad is not None
    return table.weight.grad


def test_a_tables_gradient_is_that_of_an_embedding() -> None:
    """After several batches, added up or not."""
    ours, theirs = Table(9, 4), nn.Embedding(9, 4)
    for cleared, ids in [(True, [[1, 2], [2, 8]]), (True, [[3, 3]]), (False, [[4, 1]]), (True, [[0, 8]])]:
        for table in (ours, theirs):
            if cleared:
                table.zero_grad(set_to_none=True)
        torch.testing.assert_close(look_up(ours, ids), look_up(theirs, ids))


def test_a_table_uses_its_gradients_memory_again_but_never_while_somebody_holds_it() -> None:
    table = Table(9, 4)
    place = look_up(table, [[1]]).data_ptr()
    table.zero_grad(set_to_none=True)
    held = look_up(table, [[2]])
    assert held.data_ptr() == place
    kept = held.clone()
    table.zero_grad(set_to_none=True)
    assert look_up(table, [[3]]).data_ptr() != place
    assert torch.equal(held, kept)


def test_a_table_can_be_copied_pickled_frozen_and_of_another_kind() -> None:
    table = Table(9, 4)
    look_up(table, [[1]])
    for copied in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        copied.zero_grad(set_to_none=True)
        assert look_up(copied, [[1]]).data_ptr() != table.weight.grad.data_ptr()  # type: ignore[union-attr]
    assert look_up(Table(9, 4).double(), [[1]]).dtype == torch.float64
    assert not table.requires_grad_(False)(torch.tensor([1])).requires_grad


# --- runners --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [("cls",), ("pooler",), ("pooler", "cls"), ("mean",), ("max", "cls"), POOLINGS])
@pytest.mark.parametrize("training", [False, True])
def test_runners_pool_alike_whatever_is_asked_for(asked: tuple[Pooling, ...], training: bool) -> None:
    encoder, batch = encoder_of(BERT).train(training), batch_of(BERT)
    hidden = by_run(encoder.packed(batch), batch.runs)
    for runner in (PlainRunner(encoder, "fp32"), CpuRunner(encoder, "fp32")):
        found = runner(batch, asked)
        assert list(found) == list(asked)
        for how, vectors in found.items():
            expected = torch.cat([pool(rows, None, how, encoder.pooler) for rows in hidden])
            torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)


def test_which_runner_a_cpu_gets() -> None:
    encoder = encoder_of(BERT)
    assert type(make_runner(encoder, "fp32")) is CpuRunner
    assert type(make_runner(encoder, "fp32", kernels="plain")) is PlainRunner
    assert type(make_runner(encoder, "bf16")) is PlainRunner
