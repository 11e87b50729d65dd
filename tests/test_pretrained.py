"""Published weights in every dress they come in, there and back; and folders that are broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from minbert.errors import MinbertError
from minbert.model.encoder import Encoder, EncoderConfig
from minbert.model.pretrained import load_encoder, load_folder, read_config, save_encoder
from tests.broken import BROKEN, Break, change_config

Tensors = dict[str, Tensor]
MPNET = EncoderConfig(
    kind="mpnet",
    vocab_size=40,
    width=12,
    layers=2,
    heads=3,
    feed_forward=20,
    positions=18,
    segments=0,
    norm_eps=1e-5,
    pad_id=1,
    relative_buckets=32,
)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "tiny"))


def assert_equal(found: Encoder, expected: Encoder) -> None:
    assert found.config == expected.config
    weights, others = found.state_dict(), expected.state_dict()
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.float32, name
        assert torch.equal(weight, others[name]), name


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def tensorflow_names(tensors: Tensors) -> Tensors:
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }


def masked_lm(tensors: Tensors) -> Tensors:
    """bert-base-uncased as it was published: old names, a prefix, and the heads it was trained with."""
    return prefixed("bert.")(tensorflow_names(tensors)) | LEFTOVERS


LEFTOVERS = {
    "cls.predictions.bias": torch.zeros(19),
    "cls.predictions.transform.dense.weight": torch.zeros(16, 16),
    "cls.predictions.transform.LayerNorm.gamma": torch.zeros(16),
    "cls.seq_relationship.weight": torch.zeros(2, 16),
    "bert.embeddings.position_ids": torch.arange(32)[None],
}


@pytest.mark.parametrize(
    ("dress", "ignored"),
    [
        (dict, set()),
        (tensorflow_names, set()),
        (prefixed("bert."), set()),
        (prefixed("0.auto_model."), set()),
        (masked_lm, set(LEFTOVERS)),
    ],
    ids=["as saved", "gamma and beta", "bert.", "sentence-transformers", "masked language model"],
)
def test_every_dress_of_the_same_weights(
    folder: Path, tiny_folder: Path, dress: Callable[[Tensors], Tensors], ignored: set[str]
) -> None:
    tensors = dress(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    expected, _ = load_folder(tiny_folder)
    found, report = load_folder(folder)
    assert_equal(found, expected)
    assert (set(report.ignored), report.initialised) == (ignored, ())

    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    found, report = load_folder(folder)
    assert_equal(found, expected)
    assert (set(report.ignored), report.initialised) == (ignored, ())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_single(folder: Path, half: torch.dtype) -> None:
    before, _ = load_folder(folder)
    tensors = {name: tensor.to(half) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    assert_equal(load_folder(folder)[0], before.to(half).float())


def test_a_missing_pooler_is_drawn_and_reported(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith("pooler.")}, folder / "model.safetensors")
    one, report = load_folder(folder, generator=torch.Generator().manual_seed(1))
    assert report.initialised == ("pooler.dense.weight", "pooler.dense.bias")
    same, other = (load_folder(folder, generator=torch.Generator().manual_seed(seed))[0] for seed in (1, 2))
    assert torch.equal(one.pooler.dense.weight, same.pooler.dense.weight)
    assert not torch.equal(one.pooler.dense.weight, other.pooler.dense.weight)
    assert torch.equal(one.embeddings.tokens.weight, tensors["embeddings.word_embeddings.weight"])


def test_gte_small_has_no_pooler(encoder_folder: Callable[[str], Path]) -> None:
    encoder, report = load_folder(encoder_folder("gte-small"))
    assert report.initialised == ("pooler.dense.weight", "pooler.dense.bias")
    assert encoder.config == EncoderConfig(width=384, feed_forward=1536)


def test_layers_too_many_are_reported(folder: Path) -> None:
    change_config(num_hidden_layers=1)(folder)
    _, report = load_folder(folder)
    assert len(report.ignored) == 16
    assert all(name.startswith("encoder.layer.1.") for name in report.ignored)


@pytest.mark.parametrize("config", [EncoderConfig(vocab_size=40, width=8, layers=1, heads=2), MPNET])
def test_saved_and_loaded_is_the_same(config: EncoderConfig, tmp_path: Path) -> None:
    encoder = Encoder(config)
    save_encoder(encoder, tmp_path / "new" / "folder")
    found, report = load_folder(tmp_path / "new" / "folder")
    assert_equal(found, encoder)
    assert (report.ignored, report.initialised) == ((), ())


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_shape_survives_a_round_trip(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    heads = data.draw(st.integers(1, 4))
    config = EncoderConfig(
        vocab_size=data.draw(st.integers(1, 30)),
        width=heads * data.draw(st.integers(1, 5)),
        layers=data.draw(st.integers(1, 3)),
        heads=heads,
        feed_forward=data.draw(st.integers(1, 9)),
        positions=data.draw(st.integers(1, 9)),
        segments=data.draw(st.integers(0, 3)),
        activation=data.draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"])),
        norm_eps=data.draw(st.floats(0, 1e-3)),
        dropout=data.draw(st.floats(0, 1)),
        attention_dropout=data.draw(st.floats(0, 1)),
    )
    encoder, folder = Encoder(config), tmp_path_factory.mktemp("round")
    save_encoder(encoder, folder)
    assert_equal(load_folder(folder)[0], encoder)


@pytest.mark.parity
@pytest.mark.parametrize("config", [EncoderConfig(vocab_size=40, width=8, layers=2, heads=2), MPNET])
def test_transformers_loads_what_we_save(config: EncoderConfig, tmp_path: Path) -> None:
    encoder = Encoder(config).eval()
    save_encoder(encoder, tmp_path)
    theirs, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    ids = torch.arange(3, 18).view(3, 5)
    torch.testing.assert_close(theirs.eval()(ids).last_hidden_state, encoder(ids), atol=2e-5, rtol=0)

    theirs.save_pretrained(tmp_path / "back")  # and we load what they save
    assert_equal(load_folder(tmp_path / "back")[0], encoder)


def test_dropout_can_be_replaced(tiny_folder: Path) -> None:
    assert read_config(tiny_folder).dropout == 0.1
    config = load_encoder(tiny_folder, dropout=0.3).config
    assert (config.dropout, config.attention_dropout) == (0.3, 0.3)


@pytest.mark.parametrize(("kind", "pad_id", "buckets"), [("bert", 0, 0), ("mpnet", 1, 32)])
def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path, kind: str, pad_id: int, buckets: int) -> None:
    sizes = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    sizes += ["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **dict.fromkeys(sizes, 4)}))
    config = read_config(tmp_path)
    assert (config.pad_id, config.relative_buckets, config.segments) == (pad_id, buckets, 2 if kind == "bert" else 0)
    assert (config.norm_eps, config.activation, config.dropout) == (1e-12, "gelu", 0.1)


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_is_refused_in_one_line(folder: Path, damage: Break, message: str) -> None:
    damage(folder)
    with pytest.raises(MinbertError, match=message) as caught:
        load_folder(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "was-here").exists()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_end_in_a_traceback(
    data: st.DataObject, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copyfile(tiny_folder / "config.json", folder / "config.json")
    name = data.draw(st.sampled_from(["model.safetensors", "pytorch_model.bin", "old pytorch_model.bin"]))
    path = folder / name.removeprefix("old ")
    if path.suffix == ".bin":
        tensors = load_file(tiny_folder / "model.safetensors")
        torch.save(tensors, path, _use_new_zipfile_serialization=not name.startswith("old "))
    else:
        shutil.copyfile(tiny_folder / "model.safetensors", path)
    whole = bytearray(path.read_bytes())
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=4)):
        whole[place] = byte
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))])
    try:
        load_folder(folder)
    except MinbertError as error:
        assert "\n" not in str(error)
