"""Texts to vectors with a bare encoder.

Embedder.load("minilm").embed(["A cat sat.", "A dog ran."])     # (2, 384) float32
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from minbert.data.tokenizer import Tokenizer
from minbert.encoders import find_encoder
from minbert.errors import MinbertError
from minbert.model.encoder import POOLINGS, Encoder, Pooling
from minbert.model.multitask import encode_pooled
from minbert.model.pretrained import load_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from minbert.data.tokenizer import Tokens, Truncation

WINDOW = 8192  # texts of a stream that are sorted together


class Embedder:
    """An encoder, its tokenizer and a way to pool: everything between a text and its vector."""

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        *,
        pooling: Pooling = "mean",
        device: str = "cpu",
        max_tokens: int | None = None,
    ) -> None:
        if pooling not in POOLINGS:
            raise MinbertError(f'pooling is "{pooling}"; expected one of: {", ".join(POOLINGS)}')
        try:
            self.device = torch.device(device)
            self.encoder = encoder.to(self.device).eval()
        except (AssertionError, RuntimeError) as error:  # torch knows no such device, or this machine has none
            reason = str(error).splitlines()[0]
            raise MinbertError(f'device is "{device}" ({reason}); expected one that is here, such as cpu') from None
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.max_tokens = max_tokens

    @classmethod
    def load(
        cls, name: str | Path, *, pooling: Pooling = "mean", device: str = "cpu", max_tokens: int | None = None
    ) -> Embedder:
        """From a folder, a hub id or a name of the cache."""
        folder = find_encoder(name)
        encoder, report = load_folder(folder)
        if pooling == "pooler" and report.initialised:
            raise MinbertError(f'"{name}" has no pooler weights; expected --pooling mean or cls')
        return cls(encoder, Tokenizer.load(folder), pooling=pooling, device=device, max_tokens=max_tokens)

    @property
    def width(self) -> int:
        return self.encoder.config.width

    def embed(self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None) -> NDArray[np.float32]:
        """One vector per text, (texts, width), in their order. `progress` is told how many more are done."""
        return self._embed(self.tokenizer.encode(texts, max_tokens=self.max_tokens), progress)

    def stream(
        self, texts: Iterable[str], *, progress: Callable[[int], None] | None = None, window: int = WINDOW
    ) -> Iterator[tuple[list[str], NDArray[np.float32], Truncation]]:
        """Windows of a stream of any length: the texts, their vectors, and what was truncated."""
        waiting: list[str] = []
        for text in texts:
            waiting.append(text)
            if len(waiting) == window:
                yield self._window(waiting, progress)
                waiting = []
        if waiting:
            yield self._window(waiting, progress)

    def _window(
        self, texts: list[str], progress: Callable[[int], None] | None
    ) -> tuple[list[str], NDArray[np.float32], Truncation]:
        tokens = self.tokenizer.encode(texts, max_tokens=self.max_tokens)
        return texts, self._embed(tokens, progress), tokens.truncation

    def _embed(self, tokens: Tokens, progress: Callable[[int], None] | None) -> NDArray[np.float32]:
        return encode_pooled(self.encoder, tokens, [self.pooling], progress=progress)[self.pooling]
