"""Sequences end to end: nothing is lost or mixed up in them, and the encoder reads them as it reads padded ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minbert.errors import MinbertError
from minbert.model.encoder import POOLINGS, EncoderConfig, Pooling, pool, pool_packed
from minbert.model.packed import BLOCK, block_size, block_table, pack, positions, runs_of
from minbert.model.runner import FusedRunner, PlainRunner, fused_here, make_runner
from tests.sequences import gradients, padded, small_encoder, tokens_of

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=30)
RAGGED = {
    "one": [1],
    "equal": [7, 7, 7],
    "every length": list(range(1, 21)),
    "far apart": [1, 1, 2, 40, 40, 158],
}


# --- the arrays -----------------------------------------------------------------------------------------------------


@given(LENGTHS)
@settings(deadline=None)
def test_runs_are_the_lengths_in_short(lengths: list[int]) -> None:
    runs = runs_of(np.sort(lengths))
    assert [length for count, length in runs for _ in range(count)] == sorted(lengths)
    assert len({length for _, length in runs}) == len(runs), "of sorted lengths, each in one run"


@given(LENGTHS, st.integers(0, 5))
@settings(deadline=None)
def test_positions_begin_anew_in_each_sequence(lengths: list[int], first: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    found = positions(offsets, first)
    assert found.dtype == np.int32
    assert found.tolist() == [first + place for length in lengths for place in range(length)]


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30))
@settings(deadline=None)
def test_blocks_hold_each_token_once(lengths: list[int]) -> None:
    """An empty sequence, of which a fixed layout has some, has no block."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = block_table(offsets[:-1], np.asarray(lengths))
    assert table.dtype == np.int32
    assert table.shape == (sum(-(-length // BLOCK) for length in lengths), 3)
    held = [
        start + token for start, length, first in table.tolist() for token in range(first, min(first + BLOCK, length))
    ]
    assert held == list(range(offsets[-1]))
    sequences = set(pairwise(offsets.tolist()))
    assert all((start, start + length) in sequences for start, length, _ in table.tolist())


@given(LENGTHS, st.sampled_from(["bert", "mpnet"]))
@settings(deadline=None)
def test_a_packed_batch_is_its_tokens(lengths: list[int], kind: str) -> None:
    config = EncoderConfig(kind=kind, pad_id=1 if kind == "mpnet" else 0)  # type: ignore[arg-type]
    tokens = tokens_of(lengths)
    packed = pack(tokens, config, CPU)
    assert packed.ids.tolist() == tokens.ids.tolist()
    assert packed.segments.tolist() == tokens.segments.tolist()
    assert packed.offsets.tolist() == tokens.offsets.tolist()
    assert packed.positions.tolist() == positions(tokens.offsets, 2 if kind == "mpnet" else 0).tolist()
    assert {packed.ids.dtype, packed.positions.dtype, packed.segments.dtype, packed.blocks.dtype} == {torch.int32}
    assert packed.offsets.dtype == torch.int64
    assert packed.block == block_size(max(lengths))
    assert packed.short == (max(lengths) <= BLOCK)
    if packed.short:
        assert packed.block >= max(lengths)
        assert len(packed.blocks) == len(lengths)
    assert sum(count * length for count, length in packed.runs) == len(packed.ids)


@pytest.mark.parametrize(("longest", "size"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (512, 64)])
def test_block_sizes(longest: int, size: int) -> None:
    assert block_size(longest) == size


# --- the encoder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_packed_sequences_are_read_as_padded_ones(kind: str, lengths: Sequence[int]) -> None:
    encoder, tokens = small_encoder(kind), tokens_of(lengths, kind=kind)
    ids, mask, segments = padded(tokens, encoder.config.pad_id)
    expected = encoder(ids, mask, segments)[mask]  # (tokens, width)
    found = encoder.packed(pack(tokens, encoder.config, CPU))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    wanted = gradients(encoder)
    (found * weights).sum().backward()
    same = gradients(encoder)
    assert same.keys() == wanted.keys()
    for name, value in same.items():
        scale = max(1.0, float(wanted[name].abs().max()))
        torch.testing.assert_close(
            value / scale, wanted[name] / scale, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert ("relative_bias.weight" in same) == (kind == "mpnet")


@pytest.mark.parametrize("how", POOLINGS)
@pytest.mark.parametrize("by_runs", [True, False], ids=["by runs", "by offsets"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_packed_sequences_are_pooled_as_padded_ones(how: Pooling, by_runs: bool, lengths: Sequence[int]) -> None:
    encoder, tokens = small_encoder(), tokens_of(lengths)
    packed = pack(tokens, encoder.config, CPU)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn((len(packed.ids), 32), generator=generator).requires_grad_()
    _, mask, _ = padded(tokens, 0)
    square = torch.zeros((*mask.shape, 32)).masked_scatter(mask[:, :, None].expand(-1, -1, 32), hidden)
    expected = pool(square, mask, how, encoder.pooler)
    found = pool_packed(hidden, packed, how, encoder.pooler, by_runs=by_runs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    weights = torch.randn(found.shape, generator=generator)
    wanted = torch.autograd.grad((expected * weights).sum(), hidden)[0]
    same = torch.autograd.grad((found * weights).sum(), hidden)[0]
    torch.testing.assert_close(same, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("by_runs", [True, False])
def test_the_pooler_must_be_given(by_runs: bool) -> None:
    packed = pack(tokens_of([2, 3]), EncoderConfig(), CPU)
    with pytest.raises(ValueError, match="needs the encoder's pooler"):
        pool_packed(torch.zeros(5, 32), packed, "pooler", by_runs=by_runs)


def test_what_the_encoder_cannot_read_is_told() -> None:
    encoder = small_encoder(positions=20)
    with pytest.raises(MinbertError, match="a sequence of 21 tokens; this encoder has positions for 20"):
        encoder.packed(pack(tokens_of([3, 21]), encoder.config, CPU))
    tokens = tokens_of([3, 4])
    tokens.ids[2] = 40
    with pytest.raises(MinbertError, match="token id 40; expected 0 to 39"):
        encoder.packed(pack(tokens, encoder.config, CPU))


def test_packed_sequences_are_dropped_out_of_only_in_training() -> None:
    encoder = small_encoder(dropout=0.5)
    packed = pack(tokens_of([3, 5]), encoder.config, CPU)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        assert not torch.equal(encoder.packed(packed), encoder.packed(packed))
        encoder.eval()
        assert torch.equal(encoder.packed(packed), encoder.packed(packed))


# --- who runs it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpu_has_torchs_own_kernels(kernels: str, precision: str) -> None:
    encoder = small_encoder()
    assert not fused_here(encoder)
    runner = make_runner(encoder, precision, kernels=kernels)
    assert isinstance(runner, PlainRunner)
    assert not isinstance(runner, FusedRunner)
    assert runner.encoder is encoder
    assert runner.precision == precision
    if kernels == "plain":
        assert type(runner) is PlainRunner


@pytest.mark.parametrize("poolings", [*([how] for how in POOLINGS), ["cls", "pooler"], list(POOLINGS)])
@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("training", [True, False])
def test_a_runner_is_the_encoder_pooled(poolings: list[Pooling], kernels: str, training: bool) -> None:
    """Vectors and gradients, also where only first tokens are asked for and the last layer need not see the rest."""
    for kind in ("bert", "mpnet"):
        encoder = small_encoder(kind).train(training)
        runner = make_runner(encoder, "fp32", kernels=kernels)
        packed = pack(tokens_of([1, 4, 4, 9], kind=kind), encoder.config, CPU)
        runner.refresh()
        found = runner(packed, poolings)
        assert set(found) == set(poolings)
        hidden = encoder.packed(packed)
        expected = {how: pool_packed(hidden, packed, how, encoder.pooler) for how in poolings}
        generator = torch.Generator().manual_seed(3)
        weights = {how: torch.randn((4, 32), generator=generator) for how in poolings}
        for how in poolings:
            assert found[how].dtype == torch.float32
            torch.testing.assert_close(found[how], expected[how], rtol=0, atol=1e-5)
        slopes = []
        for vectors in (found, expected):
            sum((vectors[how] * weights[how]).sum() for how in poolings).backward()  # type: ignore[union-attr]
            slopes.append(gradients(encoder))
        assert slopes[0].keys() == slopes[1].keys()
        for name, value in slopes[0].items():
            torch.testing.assert_close(value, slopes[1][name], rtol=1e-4, atol=1e-5, msg=f"{kind} {name}")
