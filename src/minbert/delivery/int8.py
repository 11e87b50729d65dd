"""What int8 needs to know: the ranges of activations, measured once, and weights as whole numbers.

    ranges = measure_ranges(encoder, calibration_tokens(tokenizer))        # of onnx_encoder
    whole, scales = quantize(weight)

A range that is fixed does not depend on what else is in a batch, and neither does a sequence's vector. The ranges hold for
what is far from the calibration too, because what is quantized comes from a LayerNorm, is a mean of attention's values, or
is GELU's, whose outliers are computed aside; docs/lab-log.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from minbert.data.batches import pad, plan_batches
from minbert.data.tokenizer import Tokens
from minbert.model.encoder import Encoder, EncoderConfig

SMOOTHING = 0.7  # how much of a channel's size moves from the activations into the weights
ASIDE = 6  # at most so many feed-forward units are computed in fp32 beside the others
OUTLIER = 1.5  # times as large as the largest of the others
VOCABULARY_TOKENS = 1024  # that ranges are measured with beside the texts

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Range:
    """The least and the greatest value of each input channel of a linear layer; 0 is always within."""

    low: Floats
    high: Floats

    @property
    def peaks(self) -> Floats:
        return np.maximum(-self.low, self.high)

    def __truediv__(self, factor: Floats) -> Range:
        return Range(self.low / factor, self.high / factor)

    def without(self, channels: NDArray[np.intp]) -> Range:
        return Range(np.delete(self.low, channels), np.delete(self.high, channels))

    def as_bytes(self) -> tuple[np.float32, np.uint8]:
        """The scale, and the whole number that stands for 0, of one range for all channels."""
        low, high = float(self.low.min(initial=0)), float(self.high.max(initial=0))
        scale = max((high - low) / 255, float(np.finfo(np.float32).tiny))
        return np.float32(scale), np.uint8(np.clip(np.rint(-low / scale), 0, 255))


Ranges = Mapping[str, Range]
"""By the linear layer's name."""


def balance(peaks: Floats, weight: Floats) -> Floats:
    """What each input channel of a linear layer is divided by: between the activations' size and the weights'."""
    sizes = np.abs(weight).max(0)
    factor = np.maximum(peaks, 1e-3) ** SMOOTHING / np.maximum(sizes, 1e-4) ** (1 - SMOOTHING)
    return (factor / np.exp(np.log(factor).mean())).astype(np.float32)


def outliers(peaks: Floats) -> NDArray[np.intp]:
    """The channels whose peaks stand far above all others."""
    if len(peaks) <= ASIDE:
        return np.zeros(0, np.intp)
    largest = np.argsort(-peaks)[: ASIDE + 1]
    return largest[peaks[largest] > OUTLIER * peaks[largest[-1]]]


def quantize(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Weights, (outputs, inputs), as whole numbers and one scale for each output.

    Without VNNI a CPU multiplies two neighbouring inputs, each 0 to 255, and adds the two products in 16 bits, which
    must not overflow: two neighbours of one sign may add up to 128. The scale leaves 127, and rounding may add 1.
    """
    outputs, inputs = weight.shape
    even = np.pad(weight, ((0, 0), (0, inputs % 2))).reshape(outputs, -1, 2)
    positive, negative = np.maximum(even, 0).sum(-1).max(1), np.maximum(-even, 0).sum(-1).max(1)
    scales = np.maximum(np.maximum(positive, negative) / 127, np.finfo(np.float32).tiny).astype(np.float32)
    return np.clip(np.rint(weight / scales[:, None]), -127, 127).astype(np.int8), scales


@torch.inference_mode()
def measure_ranges(encoder: Encoder, tokens: Tokens | None) -> dict[str, Range]:
    """How large each input channel of every linear layer gets, with typical sequences and with tokens from all over the
    vocabulary; without the first only with those."""
    extremes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    real: torch.Tensor

    def remember(name: str, x: torch.Tensor) -> None:
        low, high = x[real].amin(0), x[real].amax(0)
        known = extremes.get(name, (torch.zeros_like(low), torch.zeros_like(high)))
        extremes[name] = torch.minimum(known[0], low), torch.maximum(known[1], high)

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: remember(name, inputs[0]))
        for name, module in encoder.named_modules()
        if name.endswith((".qkv", ".out", ".up", ".down"))
    ]
    anything = vocabulary_tokens(encoder.config)
    tokens = anything if tokens is None else Tokens.join([tokens, anything])
    training = encoder.training
    encoder.eval()
    try:
        for rows in plan_batches(tokens.lengths, tokens=2048):
            batch = pad(tokens, rows, encoder.config.pad_id)
            real = torch.from_numpy(batch.mask)
            encoder(torch.from_numpy(batch.ids), real, torch.from_numpy(batch.segments))
    finally:
        encoder.train(training)
        for hook in hooks:
            hook.remove()
    return {name: Range(low.float().numpy(), high.float().numpy()) for name, (low, high) in extremes.items()}


def vocabulary_tokens(config: EncoderConfig) -> Tokens:
    """Sequences of tokens from all over the vocabulary, of every length that is a power of two."""
    lengths: list[int] = []
    while sum(lengths) < VOCABULARY_TOKENS:
        lengths += [length for power in range(8) if (length := 2**power) <= config.max_tokens]
    total = sum(lengths)
    ids = np.arange(total) * 7919 % config.vocab_size  # a large prime: neighbours have nothing in common
    segments = np.arange(total) // 5 % max(1, config.segments)
    return Tokens(ids.astype(np.int32), segments.astype(np.uint8), np.cumsum([0, *lengths]))
