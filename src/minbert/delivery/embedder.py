"""Texts to vectors with a bare encoder.

Embedder.load("minilm").embed(["A cat sat.", "A dog ran."])     # (2, 384) float32
Embedder.load("minilm", precision="int8")                       # in ONNX Runtime, faster on a CPU
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from minbert.data.tokenizer import Tokenizer
from minbert.delivery.backends import PooledEncoder, choose_backend, open_onnx
from minbert.delivery.exported import is_export, open_export
from minbert.delivery.onnx_encoder import OnnxEncoder
from minbert.encoders import find_encoder
from minbert.errors import MinbertError, require
from minbert.tasks import PoolingName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from minbert.data.tokenizer import Tokens, Truncation
    from minbert.delivery.backends import BackendName, Precision
    from minbert.model.encoder import Encoder

WINDOW = 8192  # texts of a stream that are sorted together


class Embedder:
    """An encoder, its tokenizer and a way to pool: everything between a text and its vector."""

    def __init__(
        self,
        encoder: Encoder | OnnxEncoder,
        tokenizer: Tokenizer,
        *,
        pooling: PoolingName = "mean",
        device: str = "cpu",
        max_tokens: int | None = None,
        precision: Precision = "fp32",
        pooling_weights: Mapping[str, float] | None = None,
    ) -> None:
        if (pooling == "weighted") != bool(pooling_weights):
            found = "no weights" if pooling == "weighted" else "weights"
            raise MinbertError(
                f'pooling is "{pooling}", with {found}; expected "weighted" with pooling_weights, or neither'
            )
        if pooling not in get_args(PoolingName):
            raise MinbertError(f'pooling is "{pooling}"; expected one of: {", ".join(get_args(PoolingName))}')
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.max_tokens = max_tokens
        self.pooling_weights = pooling_weights or None
        self.width: int
        self._pooled: PooledEncoder
        if isinstance(encoder, OnnxEncoder):
            self.width, self._pooled = encoder.width, encoder
        else:
            from minbert.delivery.torch_backend import TorchEncoder

            self.width, self._pooled = encoder.config.width, TorchEncoder.on(encoder, device, precision)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        pooling: PoolingName = "mean",
        device: str = "cpu",
        max_tokens: int | None = None,
        precision: Precision = "fp32",
        backend: BackendName | None = None,
        pooling_weights: Mapping[str, float] | None = None,
    ) -> Embedder:
        """From a folder, a hub id or a name of the cache; or from an export, whose encoder it is then.

        Args:
            name: the encoder.
            pooling: how the tokens' vectors become the text's.
            device: "cpu", "cuda" or "cuda:N".
            max_tokens: longer texts are cut.
            precision: fp32 everywhere, int8 on the CPU, tf32, bf16 and fp16 on a GPU.
            backend: "torch" or "onnx"; default torch, and ONNX Runtime for int8. Its file is built the first time.
            pooling_weights: by part of speech, for pooling "weighted"; see `ModelConfig.pooling_weights`.
        """
        if is_export(Path(name).expanduser()):
            model, tokenizer, _ = open_export(
                Path(name).expanduser(), device=device, precision=precision, backend=backend
            )
            return cls(model, tokenizer, pooling=pooling, max_tokens=max_tokens or model.manifest["max_tokens"])
        chosen = choose_backend(precision, backend, device)
        folder = find_encoder(name)
        encoder: Encoder | OnnxEncoder
        if chosen == "onnx":
            encoder = open_onnx(folder, precision)
            has_pooler = "pooler" in encoder.poolings
        else:
            require("torch", "train", "an encoder in torch")
            from minbert.model.pretrained import load_folder

            encoder, report = load_folder(folder)
            has_pooler = not report.initialised
        if pooling == "pooler" and not has_pooler:
            raise MinbertError(f'"{name}" has no pooler weights; expected --pooling mean or cls')
        tokenizer = Tokenizer.load(folder)
        return cls(
            encoder,
            tokenizer,
            pooling=pooling,
            device=device,
            max_tokens=max_tokens,
            precision=precision,
            pooling_weights=pooling_weights,
        )

    def embed(self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None) -> NDArray[np.float32]:
        """One vector per text, (texts, width), in their order. `progress` is told how many more are done."""
        return self._embed(self._tokenize(texts), progress)

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
        tokens = self._tokenize(texts)
        return texts, self._embed(tokens, progress), tokens.truncation

    def _tokenize(self, texts: Sequence[str]) -> Tokens:
        return self.tokenizer.encode(texts, max_tokens=self.max_tokens, weights=self.pooling_weights)

    def _embed(self, tokens: Tokens, progress: Callable[[int], None] | None) -> NDArray[np.float32]:
        return self._pooled.encode(tokens, [self.pooling], progress=progress)[self.pooling]
