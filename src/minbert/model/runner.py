"""How an encoder's parameters are run: as torch writes it, or with kernels of our own.

    runner = make_runner(encoder, "bf16")
    hidden = runner(packed)                            # (tokens, width)
    sentences = runner.pool(hidden, packed, "mean")    # (sequences, width) float32

Both runners compute the same; `FusedRunner` needs a GPU and Triton and takes a few launches a layer.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from minbert.model.encoder import Encoder, Pooling, pool_packed
from minbert.model.packed import Packed

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Runner(Protocol):
    encoder: Encoder

    def __call__(self, batch: Packed) -> Tensor: ...
    def pool(self, hidden: Tensor, batch: Packed, how: Pooling) -> Tensor: ...
    def refresh(self) -> None:
        """To be called when the weights have changed."""


class PlainRunner:
    """The encoder's own modules, under autocast where less than float32 is wanted."""

    def __init__(self, encoder: Encoder, precision: str) -> None:
        self.encoder, self.precision = encoder, precision

    def __call__(self, batch: Packed) -> Tensor:
        with self._autocast():
            return self.encoder.packed(batch)

    def pool(self, hidden: Tensor, batch: Packed, how: Pooling) -> Tensor:
        return pool_packed(hidden.float(), batch, how, self.encoder.pooler)

    def refresh(self) -> None: ...

    def _autocast(self) -> torch.autocast:
        device = self.encoder.embeddings.tokens.weight.device.type
        return torch.autocast(device, LOW.get(self.precision, torch.bfloat16), enabled=self.precision in LOW)


class FusedRunner:
    """`fused.py`: packed sequences through kernels of our own."""

    def __init__(self, encoder: Encoder, precision: str) -> None:
        from minbert.model.fused import FusedEncoder

        self.encoder = encoder
        self.fused = FusedEncoder(encoder, LOW.get(precision, torch.float32))

    def __call__(self, batch: Packed) -> Tensor:
        return self.fused(batch)

    def pool(self, hidden: Tensor, batch: Packed, how: Pooling) -> Tensor:
        return pool_packed(hidden, batch, how, self.encoder.pooler, by_runs=False).float()

    def refresh(self) -> None:
        self.fused.refresh()


def make_runner(encoder: Encoder, precision: str, *, kernels: str = "auto") -> Runner:
    """The fastest way that this encoder's device has.

    Args:
        precision: of the products: fp32, tf32, bf16 or fp16.
        kernels: "plain" for torch's own, "auto" for ours where they run.
    """
    if kernels == "auto" and fused_here(encoder):
        return FusedRunner(encoder, precision)
    return PlainRunner(encoder, precision)


def fused_here(encoder: Encoder) -> bool:
    """Is there a GPU, a Triton, and a shape that the kernels know?"""
    on_gpu = encoder.embeddings.tokens.weight.device.type == "cuda"
    if not on_gpu or importlib.util.find_spec("triton") is None:
        return False
    from minbert.model.fused import supports

    return supports(encoder.config)
