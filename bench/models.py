"""Encoders to measure with: published ones where they are, otherwise random ones of the same shape.

For speed the weights do not matter, so a machine without them still measures; every contender loads the same folder.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minbert.encoders import WEIGHTS, find_encoder
from minbert.errors import MinbertError
from minbert.model.encoder import Encoder, EncoderConfig
from minbert.model.pretrained import read_config, save_encoder

SHAPES = {
    "minilm": EncoderConfig(width=384, layers=6, heads=12, feed_forward=1536),
    "mpnet": EncoderConfig(
        kind="mpnet", vocab_size=30527, positions=514, segments=0, norm_eps=1e-5, pad_id=1, relative_buckets=32
    ),
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")


@dataclass(frozen=True)
class Model:
    """An encoder's folder in Hugging Face layout, and what is in it."""

    name: str
    folder: Path
    shape: EncoderConfig
    weights: str
    vocabulary: str

    @property
    def matrix_parameters(self) -> int:
        """Of the encoder's layers, without embeddings, biases and norms: what a token is multiplied with."""
        width, inner = self.shape.width, self.shape.feed_forward
        return self.shape.layers * (4 * width * width + 2 * width * inner)

    def flops(self, tokens: int, squares: int) -> float:
        """Of training: 6 for each matrix parameter and token, 12 * layers * width for each (query, key) pair."""
        return 6.0 * self.matrix_parameters * tokens + 12.0 * self.shape.layers * self.shape.width * squares

    def about(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "weights": self.weights,
            "vocabulary": self.vocabulary,
            "layers": shape.layers,
            "width": shape.width,
            "heads": shape.heads,
            "feed_forward": shape.feed_forward,
            "matrix_parameters": self.matrix_parameters,
            "bytes": sum(path.stat().st_size for path in self.folder.iterdir() if path.name in WEIGHTS),
        }


def find_model(name: str, work: Path, given: Path | None = None, tokenizer: Path | None = None) -> Model:
    """The folder given, the cached encoder of that name, or random weights in `work`.

    Args:
        name: "minilm" or "mpnet".
        work: folder for random weights; it has to outlive the model.
        given: a folder in Hugging Face layout; without weights, its tokenizer goes to random ones.
        tokenizer: folder whose vocabulary random weights get; default minilm's.
    """
    try:
        folder = given or find_encoder(name)
    except MinbertError:
        folder = None
    if folder is not None and any((folder / file).exists() for file in WEIGHTS):
        return Model(name, folder, read_config(folder), "those of the folder", "its own")
    source = folder or tokenizer or find_encoder("minilm")
    target = work / name
    if not (target / "config.json").exists():  # else another part of the run made it
        save_encoder(Encoder(SHAPES[name], generator=torch.Generator().manual_seed(1)), target)
    for file in TOKENIZER:
        if (source / file).exists():
            shutil.copy(source / file, target / file)
    if not (target / "tokenizer_config.json").exists():  # else an MPNet would be looked for with its own special tokens
        special = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")}
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512} | special
        (target / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
    own = SHAPES[name].kind == "bert" or folder is not None
    return Model(name, target, SHAPES[name], "random", "its own" if own else "minilm's (as many tokens to a percent)")
