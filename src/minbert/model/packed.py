"""Sequences of different lengths, laid end to end as tensors.

    packed = pack(tokens, encoder.config, device)        # tokens sorted by length
    hidden = encoder.packed(packed)                      # (tokens, width)

On a CPU, runs of sequences of equal length are what attention works on; on a GPU, a table of blocks is. A batch of a
fixed layout, for a CUDA graph, is longer than its tokens: what is left at its end is made of sequences of the padding
token that nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minbert.data.tokenizer import Tokens

if TYPE_CHECKING:
    from minbert.model.encoder import EncoderConfig

BLOCK, SHORTEST = 64, 16  # tokens of a block of attention's kernels, at most and at least
Runs = tuple[tuple[int, int], ...]
"""(sequences, length) of each run of equal length."""
KINDS = {"offsets": np.int64, "weights": np.float32}  # the other arrays are of 32-bit whole numbers


@dataclass(frozen=True, eq=False)
class Packed:
    """A batch on its device."""

    ids: Tensor
    """(tokens,)"""
    positions: Tensor
    """(tokens,) rows of the position table."""
    segments: Tensor
    """(tokens,)"""
    offsets: Tensor
    """(sequences + 1,) where each sequence begins."""
    blocks: Tensor
    """(blocks, 3): a sequence's first token, its length, and the block's first token within it."""
    block: int
    """Tokens of a block: 64, or 16 or 32 where no sequence is longer."""
    short: bool
    """No sequence is longer than a block."""
    runs: Runs = ()
    """Empty for a batch of a fixed layout."""
    weights: Tensor | None = None
    """(tokens,) in float32, for pooling "weighted"."""


def pack(tokens: Tokens, config: EncoderConfig, device: torch.device) -> Packed:
    """As many tokens as there are; they must be sorted by length."""
    lengths = tokens.lengths
    arrays: dict[str, NDArray[Any]] = {
        "ids": tokens.ids,
        "positions": positions(tokens.offsets, config.first_position),
        "segments": tokens.segments,
        "offsets": tokens.offsets,
        "blocks": block_table(tokens.offsets[:-1], lengths),
    }
    if tokens.weights is not None:
        arrays["weights"] = tokens.weights
    moved = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array, KINDS.get(name, np.int32)))
        moved[name] = tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
    longest = int(lengths.max(initial=0))
    return Packed(**moved, block=block_size(longest), short=longest <= BLOCK, runs=runs_of(lengths))


def block_size(longest: int) -> int:
    """Of the blocks of attention, for sequences of so many tokens at most."""
    return SHORTEST if longest <= SHORTEST else 32 if longest <= 32 else BLOCK


def runs_of(lengths: NDArray[np.int64]) -> Runs:
    """Runs of equal numbers, as (how many, which)."""
    starts = np.flatnonzero(np.diff(lengths, prepend=-1))
    counts = np.diff(np.append(starts, len(lengths)))
    return tuple((int(count), int(lengths[start])) for count, start in zip(counts, starts, strict=True))


def positions(offsets: NDArray[np.int64], first: int) -> NDArray[np.int32]:
    """Counted from `first` anew in each sequence."""
    counted = np.arange(first, first + offsets[-1], dtype=np.int32)
    return counted - np.repeat(offsets[:-1], np.diff(offsets)).astype(np.int32)


def block_table(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """The blocks of all sequences, (blocks, 3): see `Packed.blocks`."""
    counts = -(-lengths // BLOCK)
    owner = np.repeat(np.arange(len(lengths)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    first = (np.arange(len(owner)) - before) * BLOCK
    return np.stack([starts[owner], lengths[owner], first], axis=1).astype(np.int32)
