"""How an encoder's parameters are run: as torch writes it, or with kernels of our own.

    runner = make_runner(encoder, "bf16")
    runner(packed, ["mean"])["mean"]         # (sequences, width) float32

All of them compute the same. `FusedRunner` needs a GPU and Triton and takes a few launches a layer; `CpuRunner` is for
training in fp32 on a CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from minbert.model.cpu_ops import train_layer
from minbert.model.encoder import Encoder, Pooling, RunLayer, pool, pool_packed
from minbert.model.packed import Packed

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


FIRST: frozenset[Pooling] = frozenset({"cls", "pooler"})
"""Poolings that read the first token of a sequence and no other."""


class Runner(Protocol):
    encoder: Encoder

    def __call__(self, batch: Packed, poolings: Collection[Pooling]) -> dict[Pooling, Tensor]:
        """A vector for each sequence, (sequences, width) in float32, in every way asked for; or (tokens, width)."""

    def refresh(self) -> None:
        """To be called when the weights have changed."""


class PlainRunner:
    """The encoder's own modules, under autocast where less than float32 is wanted."""

    def __init__(self, encoder: Encoder, precision: str) -> None:
        self.encoder, self.precision = encoder, precision

    def __call__(self, batch: Packed, poolings: Collection[Pooling]) -> dict[Pooling, Tensor]:
        only_first = FIRST.issuperset(poolings)
        with self._autocast():
            hidden = self.encoder.packed(batch, only_first=only_first, run=self._run())
        hidden = hidden.float()
        if not only_first:
            return {how: pool_packed(hidden, batch, how, self.encoder.pooler) for how in poolings}
        return {how: pool(hidden.unsqueeze(1), None, how, self.encoder.pooler) for how in poolings}

    def refresh(self) -> None: ...

    def _run(self) -> RunLayer | None:
        return None

    def _autocast(self) -> torch.autocast:
        device = self.encoder.embeddings.tokens.weight.device.type
        return torch.autocast(device, LOW.get(self.precision, torch.bfloat16), enabled=self.precision in LOW)


class CpuRunner(PlainRunner):
    """The same, but layers in training mode are those of `cpu_ops.py`."""

    def _run(self) -> RunLayer | None:
        return train_layer if self.encoder.training else None


class FusedRunner:
    """`fused.py`: packed sequences through kernels of our own."""

    def __init__(self, encoder: Encoder, precision: str) -> None:
        from minbert.model.fused import FusedEncoder

        self.encoder = encoder
        self.fused = FusedEncoder(encoder, LOW.get(precision, torch.float32))

    def __call__(self, batch: Packed, poolings: Collection[Pooling]) -> dict[Pooling, Tensor]:
        hidden = self.fused(batch)  # (tokens, width)
        pooler = self.encoder.pooler
        return {how: pool_packed(hidden, batch, how, pooler, by_runs=False).float() for how in poolings}

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
    if kernels == "auto" and precision == "fp32" and encoder.embeddings.tokens.weight.device.type == "cpu":
        return CpuRunner(encoder, precision)
    return PlainRunner(encoder, precision)


def fused_here(encoder: Encoder) -> bool:
    """Is there a GPU, a Triton, and a shape that the kernels know?"""
    on_gpu = encoder.embeddings.tokens.weight.device.type == "cuda"
    if not on_gpu or importlib.util.find_spec("triton") is None:
        return False
    from minbert.model.fused import supports

    return supports(encoder.config)
