"""Token sequences of chosen lengths, and encoders small enough to check every gradient of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minbert.data.masking import Masking
from minbert.data.tokenizer import Tokens
from minbert.model.encoder import Encoder, EncoderConfig

VOCABULARY = 40
PIECES = range(25, 40)
"""For texts that are masked: below 5 are special tokens, then 20 words, and 15 pieces that go on with one."""


def tokens_of(lengths: Sequence[int], *, seed: int = 0, kind: str = "bert", sort: bool = True) -> Tokens:
    """Random ids; MPNet has no segments."""
    rng = np.random.default_rng(seed)
    sizes = np.sort(lengths) if sort else np.asarray(lengths)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    segments = rng.integers(0, 2 if kind == "bert" else 1, offsets[-1])
    return Tokens(rng.integers(0, VOCABULARY, offsets[-1]).astype(np.int32), segments.astype(np.uint8), offsets)


def texts_of(lengths: Sequence[int], seed: int = 0) -> Tokens:
    """[CLS] (2), as many random words and pieces of them, [SEP] (3)."""
    rng = np.random.default_rng(seed)
    rows = [[2, rng.integers(5, 25), *rng.integers(5, VOCABULARY, length - 1), 3] for length in lengths]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Tokens(np.concatenate(rows).astype(np.int32), np.zeros(offsets[-1], np.uint8), offsets)


def masking_of(*, rate: float = 0.15, whole_words: bool = False, seed: int = 1, place: int = 0) -> Masking:
    """For such texts; the mask is 4."""
    special, continues = np.zeros(VOCABULARY, bool), np.zeros(VOCABULARY, bool)
    special[:5], continues[list(PIECES)] = True, True
    return Masking(rate, whole_words, 4, special, continues, seed, place)


def small_encoder(kind: str = "bert", *, seed: int = 0, dropout: float = 0.0, **shape: Any) -> Encoder:
    """Two layers of two heads of 16, which is the least that the kernels take; no weight at its initial 0 or 1."""
    sizes = {"width": 32, "layers": 2, "heads": 2, "feed_forward": 48, "positions": 160} | shape
    own = {"segments": 0, "relative_buckets": 8, "pad_id": 1} if kind == "mpnet" else {}
    rates = {"dropout": dropout, "attention_dropout": dropout}
    generator = torch.Generator().manual_seed(seed)
    encoder = Encoder(EncoderConfig(kind=kind, vocab_size=VOCABULARY, **sizes, **own, **rates), generator=generator)  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    return encoder


def padded(tokens: Tokens, pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and segments as `Encoder.forward` takes them, (sequences, longest)."""
    mask = np.arange(tokens.lengths.max()) < tokens.lengths[:, None]
    ids, segments = np.full(mask.shape, pad_id, np.int64), np.zeros(mask.shape, np.int64)
    ids[mask], segments[mask] = tokens.ids, tokens.segments
    return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(segments)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of every parameter that has one; they are taken away from it."""
    found = {name: value.grad for name, value in module.named_parameters() if value.grad is not None}
    module.zero_grad(set_to_none=True)
    return found
