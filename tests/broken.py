"""Ways to break an encoder's folder, and what must be said about each: one line, with what was found and expected."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Break = Callable[[Path], object]


def change_config(**changes: Any) -> Break:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    """Edit the weights of a folder in place."""

    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def only_bin(write: Callable[[Path], object]) -> Break:
    """Replace model.safetensors by a pytorch_model.bin that `write` makes."""

    def rewrite(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        write(folder / "pytorch_model.bin")

    return rewrite


class RunsCode:
    """Unpickled the careless way, it leaves a file named `was-here` beside the pickle."""

    def __init__(self, folder: Path) -> None:
        self.target = folder / "was-here"

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def truncate(name: str, size: int) -> Break:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def put_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.layer.1.output.dense.bias"][3] = float("nan")


def narrow_key(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.layer.1.attention.self.key.weight"] = torch.zeros(16, 8)


SAFE, BIN = "model.safetensors", "pytorch_model.bin"
BROKEN: dict[str, tuple[Break, str]] = {
    "no weights": (lambda folder: (folder / SAFE).unlink(), f"no {SAFE} or {BIN}; expected one of them"),
    "safetensors cut in its header": (truncate(SAFE, 100), rf"{SAFE}: truncated or damaged safetensors, 100 bytes"),
    "safetensors cut in its tensors": (truncate(SAFE, 9000), rf"{SAFE}: truncated or damaged safetensors, 9000 bytes"),
    "empty safetensors": (truncate(SAFE, 0), rf"{SAFE}: truncated or damaged safetensors, 0 bytes"),
    "bin that is text": (
        only_bin(lambda path: path.write_text("<html>404</html>")),
        rf"{BIN}: truncated or damaged, or not a PyTorch file of tensors \(16 bytes\)",
    ),
    "bin cut short": (
        only_bin(lambda path: torch.save({"a": torch.ones(99)}, path) or truncate(BIN, 700)(path.parent)),
        rf"{BIN}: truncated or damaged, or not a PyTorch file of tensors \(700 bytes\)",
    ),
    "bin of something else": (
        only_bin(lambda path: torch.save([torch.ones(2)], path)),
        f"{BIN}: holds a list; expected a table of names and tensors",
    ),
    "pickle that runs code": (
        only_bin(lambda path: torch.save({"a": RunsCode(path.parent)}, path)),
        rf"{BIN}: a pickle that wants to run code \(.+\); refused, expected tensors only",
    ),
    "plain pickle that runs code": (
        only_bin(lambda path: path.write_bytes(pickle.dumps({"a": RunsCode(path.parent)}, protocol=2))),
        rf"{BIN}: a pickle that wants to run code \(.+\); refused, expected tensors only",
    ),
    "new pickle that runs code": (
        only_bin(lambda path: path.write_bytes(pickle.dumps({"a": RunsCode(path.parent)}, protocol=5))),
        rf"{BIN}: .*not a PyTorch file of tensors",
    ),
    "missing tensor": (
        change_tensors(lambda tensors: tensors.pop("encoder.layer.0.attention.self.key.bias")),
        rf"{SAFE}: no tensor encoder.layer.0.attention.self.key.bias; .*config.json asks for it",
    ),
    "missing layer": (
        change_config(num_hidden_layers=3),
        rf"{SAFE}: no tensor encoder.layer.2.\S+ \(and 15 more\); .*config.json asks for it",
    ),
    "shape of the vocabulary": (
        change_config(vocab_size=30),
        rf"{SAFE}: embeddings.word_embeddings.weight has shape \(19, 16\); config.json makes it \(30, 16\)",
    ),
    "shape of a key": (
        change_tensors(narrow_key),
        rf"{SAFE}: encoder.layer.1.attention.self.key.weight has shape \(16, 8\); config.json makes it \(16, 16\)",
    ),
    "NaN": (
        change_tensors(put_nan),
        rf"{SAFE}: encoder.layer.1.output.dense.bias holds NaN or infinite weights; expected finite ones",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no such file|no config.json"),
    "config that is no JSON": (truncate("config.json", 40), r"config.json: not readable JSON \(.*line 4 column"),
    "config that is no text": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
        "config.json: not readable JSON",
    ),
    "config that is a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "config.json: holds a list; expected an object",
    ),
    "unknown model": (
        change_config(model_type="gpt2"),
        r'config.json: model_type is "gpt2"; known: bert \(MiniLM, bge, gte, e5 too\), mpnet',
    ),
    "relative positions": (
        change_config(position_embedding_type="relative_key"),
        'config.json: position_embedding_type is "relative_key"; expected "absolute"',
    ),
    "decoder": (change_config(is_decoder=True), "config.json: is_decoder is true; expected an encoder"),
    "unknown activation": (change_config(hidden_act="swish2"), 'config.json: hidden_act is "swish2"; known: gelu, '),
    "activation that is a list": (change_config(hidden_act=["gelu"]), "config.json: hidden_act is .*; known: gelu, "),
    "width that is text": (
        change_config(hidden_size="16"),
        "config.json: hidden_size is '16'; expected a whole number from 1",
    ),
    "no layers": (
        change_config(num_hidden_layers=0),
        "config.json: num_hidden_layers is 0; expected a whole number from 1",
    ),
    "dropout that is text": (
        change_config(hidden_dropout_prob="none"),
        "config.json: hidden_dropout_prob is 'none'; expected a number from 0 to 1",
    ),
    "heads": (change_config(num_attention_heads=3), "width 16 cannot be divided among 3 attention heads"),
}
