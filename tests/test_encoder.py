"""The encoder against transformers, hidden states and gradients alike; pooling by hand; what it refuses.

pytest -m parity -s tests/test_encoder.py     # prints the table of the largest differences
"""

from __future__ import annotations

import ast
import copy
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

import minbert
from minbert.errors import MinbertError
from minbert.model.encoder import ACTIVATIONS, POOLINGS, Encoder, EncoderConfig, Pooler, pool, relative_buckets
from minbert.model.pretrained import _published_name, _split, load_folder, save_encoder

ENCODERS = ["minilm", "gte-small", "mpnet"]
HIDDEN = 2e-5  # the largest difference that is still the same number in fp32
EXACT = 1e-10  # the same in fp64
GRADIENT = 1e-4  # the same for gradients, relative to the largest of the tensor
TINY = EncoderConfig(vocab_size=50, width=16, layers=2, heads=4, feed_forward=24, positions=20)

transformers.logging.disable_progress_bar()  # they would drown the table
transformers.logging.set_verbosity_error()

Batch = tuple[Tensor, Tensor, Tensor]
Rows = dict[str, dict[str, float]]


def make_batch(config: EncoderConfig, lengths: list[int], seed: int = 0) -> Batch:
    """Random ids, mask and segments, padded. Real ids keep away from the padding id, which MPNet numbers by."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(5, config.vocab_size, mask.shape, generator=generator).masked_fill(~mask, config.pad_id)
    segments = torch.randint(0, max(1, config.segments), mask.shape, generator=generator) * mask
    return ids, mask, segments


def scramble(encoder: Encoder, seed: int = 0) -> Encoder:
    """No bias at 0 and no norm at 1, which would hide that one was forgotten."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return encoder.eval()


def run_both(ours: Encoder, theirs: Any, batch: Batch) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Hidden states at real tokens (tokens, width) and pooler output (batch, width) of each."""
    ids, mask, segments = batch
    hidden = ours(ids, mask, segments)
    extra = {"token_type_ids": segments} if ours.config.segments else {}
    expected = theirs(input_ids=ids, attention_mask=mask.long(), **extra)
    return (hidden[mask], ours.pooler(hidden)), (expected.last_hidden_state[mask], expected.pooler_output)


def compare_outputs(ours: Encoder, theirs: Any, batch: Batch) -> dict[str, float]:
    with torch.inference_mode():
        found, expected = run_both(ours, theirs, batch)
    return {what: float((a - b).abs().max()) for what, a, b in zip(("hidden", "pooler"), found, expected, strict=True)}


def compare_gradients(ours: Encoder, theirs: Any, batch: Batch, *, floor: float = 0.0) -> float:
    """The largest difference of a gradient, relative to the largest gradient of its tensor.

    Tensors are ours, so that the bias of the keys, whose gradient is zero but for rounding, is measured with the
    queries and values. `floor` is for batches that leave other gradients at zero, such as one token that attends to
    nothing but itself: a tensor then counts as having at least this part of the largest gradient of all.
    """
    for side, (hidden, pooled) in zip((ours, theirs), run_both(ours, theirs, batch), strict=True):
        generator = torch.Generator().manual_seed(1)
        # A plain sum would not do: after a LayerNorm it is the same whatever came before.
        loss = (hidden * torch.randn(hidden.shape, generator=generator)).sum()
        loss = loss + (pooled * torch.randn(pooled.shape, generator=generator)).sum()
        side.zero_grad()
        loss.backward()
    published = {name: weight.grad for name, weight in theirs.named_parameters()}
    differences, sizes = [], []
    for name, weight in ours.named_parameters():
        expected = torch.cat([published[_published_name(part, ours.config)] for part, _ in _split(name, weight)])
        assert weight.grad is not None
        differences.append(float((weight.grad - expected).abs().max()))
        sizes.append(float(expected.abs().max()))
    least = floor * max(sizes)
    return max(difference / max(size, least) for difference, size in zip(differences, sizes, strict=True))


@pytest.fixture(scope="module")
def parity_rows() -> Iterator[Rows]:
    """Tests note their differences here; at the end the largest of each encoder are printed."""
    rows: Rows = defaultdict(lambda: defaultdict(float))
    yield rows
    columns = ("hidden", "pooler", "gradient")
    print(f"\n\nlargest difference to transformers {transformers.__version__}, fp32, cpu (gradients: relative)")
    print(f"{'encoder':<16}" + "".join(f"{column:>10}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<16}" + "".join(f"{row[column]:>10.1e}" for column in columns))
    if path := os.environ.get("PARITY_JSON"):  # what the docs' table is generated from
        encoders = {name: {column: row[column] for column in columns} for name, row in rows.items()}
        content = {"transformers": transformers.__version__, "precision": "fp32", "device": "cpu", "encoders": encoders}
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def note(rows: Rows, name: str, found: dict[str, float]) -> None:
    for what, value in found.items():
        rows[name][what] = max(rows[name][what], value)


@pytest.fixture(scope="module", params=ENCODERS)
def published(request: pytest.FixtureRequest, encoder_folder: Callable[[str], Path]) -> tuple[str, Encoder, Any]:
    """A real encoder, ours and theirs."""
    folder = encoder_folder(request.param)
    ours, report = load_folder(folder, generator=torch.Generator().manual_seed(0))
    theirs = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if report.initialised:  # then theirs is random too
        theirs.pooler.dense.load_state_dict(ours.pooler.dense.state_dict())
    return request.param, ours.eval(), theirs


@pytest.fixture(scope="module")
def in_double(published: tuple[str, Encoder, Any]) -> tuple[Encoder, Any]:
    """The same two in fp64."""
    _, ours, theirs = published
    return copy.deepcopy(ours).double(), copy.deepcopy(theirs).double()


@pytest.mark.parity
@pytest.mark.parametrize("lengths", [[1], [2, 9, 5, 1, 3], [150, 17, 64], [1, 512, 37]], ids=str)
def test_published_encoders_equal_transformers(
    published: tuple[str, Encoder, Any], in_double: tuple[Encoder, Any], lengths: list[int], parity_rows: Rows
) -> None:
    """Equal in fp64, and in fp32 as near to that as fp32 can be. Two that round on their own may lie twice as far from each
    other: gte-small's last batch is 1.2e-5 and 1.0e-5 from fp64, to different sides, on one CPU."""
    name, ours, theirs = published
    batch = make_batch(ours.config, lengths)
    note(parity_rows, name, compare_outputs(ours, theirs, batch))
    exact, theirs_exact = in_double
    assert max(compare_outputs(exact, theirs_exact, batch).values()) <= EXACT
    ids, mask, segments = batch
    with torch.inference_mode():
        hidden, wanted = ours(ids, mask, segments), exact(ids, mask, segments)
        assert float((hidden - wanted)[mask].abs().max()) <= HIDDEN
        assert float((ours.pooler(hidden) - exact.pooler(wanted)).abs().max()) <= HIDDEN


# The table shows the worst of these. One of them alone can look four times better than another, by rounding.
@pytest.mark.parity
@pytest.mark.parametrize(
    "lengths", [[1, 140, 33], [1, 133], [60, 20], pytest.param([1, 512, 37], marks=pytest.mark.slow)], ids=str
)
def test_gradients_of_published_encoders_equal_transformers(
    published: tuple[str, Encoder, Any], lengths: list[int], parity_rows: Rows
) -> None:
    name, ours, theirs = published
    found = compare_gradients(ours, theirs, make_batch(ours.config, lengths))
    print(f"{name} {lengths}: {found:.1e}")
    note(parity_rows, name, {"gradient": found})
    assert found <= GRADIENT


@pytest.mark.slow
@pytest.mark.parity
def test_what_gradients_differ_by_is_rounding(in_double: tuple[Encoder, Any]) -> None:
    """The batch that is worst in fp32 is as good as equal in fp64: the two compute the same function."""
    assert compare_gradients(*in_double, make_batch(in_double[0].config, [1, 133])) <= EXACT


@st.composite
def configs(draw: st.DrawFn) -> EncoderConfig:
    kind = draw(st.sampled_from(["bert", "bert", "mpnet"]))
    heads = draw(st.integers(1, 4))
    mpnet = {"segments": 0, "pad_id": 1, "relative_buckets": 32}  # what transformers takes for granted
    return EncoderConfig(
        kind=kind,
        vocab_size=draw(st.integers(6, 60)),
        width=heads * draw(st.integers(2 if heads > 1 else 4, 12)),  # two numbers, normalised, are always 1 and -1
        layers=draw(st.integers(1, 3)),
        heads=heads,
        feed_forward=draw(st.integers(1, 40)),
        positions=draw(st.integers(8, 40)),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        norm_eps=draw(st.sampled_from([1e-12, 1e-5])),
        **(mpnet if kind == "mpnet" else {"segments": draw(st.integers(1, 3))}),
    )


@pytest.mark.parity
@settings(max_examples=25, deadline=None)
@given(config=configs(), data=st.data(), seed=st.integers(0, 1000))
def test_random_encoders_equal_transformers_once_saved(
    config: EncoderConfig, data: st.DataObject, seed: int, tmp_path_factory: pytest.TempPathFactory, parity_rows: Rows
) -> None:
    lengths = data.draw(st.lists(st.integers(1, config.max_tokens), min_size=1, max_size=4))
    folder = tmp_path_factory.mktemp("random")
    ours = scramble(Encoder(config, generator=torch.Generator().manual_seed(seed)), seed)
    save_encoder(ours, folder)
    theirs, info = AutoModel.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    batch = make_batch(config, lengths, seed)
    found = compare_outputs(ours, theirs.eval(), batch) | {
        "gradient": compare_gradients(ours, theirs, batch, floor=1e-3)
    }
    note(parity_rows, f"random {config.kind}", found)
    assert found["hidden"] <= HIDDEN
    assert found["pooler"] <= HIDDEN
    assert found["gradient"] <= GRADIENT


@pytest.mark.parity
def test_relative_buckets_equal_transformers() -> None:
    position = torch.arange(600)
    expected = MPNetEncoder.relative_position_bucket(position[None, :] - position[:, None])
    assert torch.equal(relative_buckets(600, 32, device=torch.device("cpu")), expected)


def test_padding_changes_nothing() -> None:
    encoder = scramble(Encoder(TINY))
    ids, mask, segments = make_batch(TINY, [3, 20, 1, 7])
    together = encoder(ids, mask, segments)
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = encoder(ids[row : row + 1, :length], None, segments[row : row + 1, :length])
        torch.testing.assert_close(together[row, :length], alone[0], atol=1e-6, rtol=1e-5)
    changed = encoder(ids.masked_fill(~mask, 7), mask, segments)
    torch.testing.assert_close(changed[mask], together[mask])


def test_what_is_left_out_has_its_default() -> None:
    encoder = scramble(Encoder(TINY))
    ids, mask, _ = make_batch(TINY, [6, 6])
    torch.testing.assert_close(encoder(ids), encoder(ids, mask, torch.zeros_like(ids)))
    torch.testing.assert_close(encoder(ids, mask.long()), encoder(ids, mask))  # tokenizers say 1 and 0


def test_segments_matter_only_where_there_are_some() -> None:
    ids, mask, segments = make_batch(TINY, [9, 4])
    assert not torch.allclose(scramble(Encoder(TINY))(ids, mask, segments), scramble(Encoder(TINY))(ids, mask))
    without = scramble(Encoder(EncoderConfig(**{**vars(TINY), "segments": 0})))
    assert torch.equal(without(ids, mask, segments), without(ids, mask))


def test_initial_weights_come_from_the_generator() -> None:
    one, same, other = (Encoder(TINY, generator=torch.Generator().manual_seed(seed)).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embeddings.tokens.weight"], other["embeddings.tokens.weight"])
    wide = Encoder(EncoderConfig(vocab_size=500, width=64, layers=1, heads=2))
    for name, weight in wide.state_dict().items():
        if "norm.weight" in name:
            assert (weight == 1).all(), name
        elif name.endswith(".bias"):
            assert (weight == 0).all(), name
        else:
            assert 0.015 < weight.std() < 0.025, name


def test_dropout_is_for_training_only() -> None:
    encoder = Encoder(TINY)
    ids, mask, _ = make_batch(TINY, [8, 5])
    assert not torch.equal(encoder.train()(ids, mask), encoder(ids, mask))
    assert torch.equal(encoder.eval()(ids, mask), encoder(ids, mask))
    still = Encoder(EncoderConfig(**{**vars(TINY), "dropout": 0.0, "attention_dropout": 0.0})).train()
    assert torch.equal(still(ids, mask), still(ids, mask))


def test_mpnet_has_two_positions_less_than_rows() -> None:
    config = EncoderConfig(kind="mpnet", positions=514, pad_id=1, segments=0, relative_buckets=32)
    assert (config.first_position, config.max_tokens) == (2, 512)
    assert EncoderConfig().max_tokens == 512


def test_pooling_by_hand() -> None:
    hidden = torch.tensor([[[1.0, -2.0], [3.0, -4.0], [100.0, 100.0]], [[-5.0, 6.0], [-1.0, 0.0], [-3.0, 9.0]]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert pool(hidden, mask, "cls").tolist() == [[1, -2], [-5, 6]]
    assert pool(hidden, mask, "mean").tolist() == [[2, -3], [-3, 5]]
    assert pool(hidden, mask, "max").tolist() == [[3, -2], [-1, 9]]
    pooler = Pooler(2)
    torch.testing.assert_close(pool(hidden, mask, "pooler", pooler), torch.tanh(pooler.dense(hidden[:, 0])))
    everything = torch.ones_like(mask)
    for how in POOLINGS:
        torch.testing.assert_close(pool(hidden, None, how, pooler), pool(hidden, everything, how, pooler))
    with pytest.raises(ValueError, match="pooler"):
        pool(hidden, mask, "pooler")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 21, dtype=torch.long), "a sequence of 21 tokens; this encoder has positions for 20"),
        (torch.tensor([[1, 50]]), r"token id 50; expected 0 to 49 \(the vocabulary\)"),
        (torch.tensor([[1, -3]]), r"token id -3; expected 0 to 49 \(the vocabulary\)"),
        (torch.zeros(0, 5, dtype=torch.long), r"an empty batch: ids have shape \(0, 5\); expected at least one token"),
        (torch.zeros(2, 0, dtype=torch.long), r"an empty batch: ids have shape \(2, 0\); expected at least one token"),
    ],
    ids=["too long", "id too large", "id negative", "no rows", "no tokens"],
)
def test_bad_ids_are_refused(ids: Tensor, message: str) -> None:
    with pytest.raises(MinbertError, match=f"^{message}$"):
        Encoder(TINY)(ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "width 16 cannot be divided among 3 attention heads"),
        ({"activation": "swish2"}, 'unknown activation "swish2"; known: gelu, gelu_new, '),
    ],
)
def test_bad_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(MinbertError, match=f"^{message}"):
        Encoder(EncoderConfig(**{**vars(TINY), **change}))


def imported(source: str) -> set[str]:
    """Top-level names of everything that a module imports, at whatever depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_the_encoder_is_our_own() -> None:
    encoder = Encoder(EncoderConfig(**{**vars(TINY), "relative_buckets": 32}))
    kinds = {type(part).__qualname__ for part in encoder.modules() if type(part).__module__.startswith("torch")}
    assert kinds == {nn.Embedding.__name__, nn.LayerNorm.__name__, nn.Linear.__name__, nn.ModuleList.__name__}
    modules = sorted(Path(minbert.__file__).parent.rglob("*.py"))
    assert len(modules) > 5
    for module in modules:
        source = module.read_text(encoding="utf-8")
        # An export for transformers is read back with it and compared; nothing else of ours may know it.
        assert ("transformers" in imported(source)) == (module.name == "hugging_face.py"), module
        assert "MultiheadAttention" not in source, module
        assert "TransformerEncoder" not in source, module


@pytest.mark.parametrize("module", ["minbert", "minbert.cli", "minbert.encoders", "minbert.data.batches"])
def test_the_base_install_needs_no_torch(module: str) -> None:
    check = f"import sys, {module}; assert not {{'torch', 'safetensors'}} & set(sys.modules), 'torch was imported'"
    subprocess.run([sys.executable, "-c", check], check=True)
