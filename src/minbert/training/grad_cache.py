"""Contrastive batches that are larger than the memory (GradCache; Gao et al. 2021, arXiv:2101.06983).

A contrastive loss compares all rows of a batch, so gradients cannot be accumulated over smaller ones. But it sees the
encoder's vectors only. So the vectors of all chunks are computed without a graph, which takes no memory to speak of;
then the loss's gradient by the vectors; and then each chunk is encoded once more, with a graph, to carry its part of
that gradient on. The second time draws the same dropout as the first: the random state is put back for each chunk.

The gradient is that of the whole batch. It costs a second forward pass, and memory for one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from minbert.data.streams import Part, Step
from minbert.tasks import CONTRASTIVE, Task

Chunk = TypeVar("Chunk")


@dataclass(frozen=True, eq=False)
class RandomState:
    """What dropout draws from, at some moment: torch's generator of the CPU, and that of the GPU."""

    cpu: Tensor
    gpu: Tensor | None
    device: torch.device

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None, device)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)


def cached_gradient(
    chunks: Sequence[Chunk],
    encode: Callable[[Chunk], Tensor],
    backward: Callable[[Tensor], None],
    device: torch.device,
) -> None:
    """The gradient of a loss over all chunks' vectors, added to the parameters' `.grad`.

    Args:
        chunks: whatever `encode` takes.
        encode: a chunk to its vectors, (rows, dim).
        backward: computes the loss of all vectors, (all rows, dim), and goes backward from it.
        device: whose random state the encoder draws from.
    """
    states, found = [], []
    for chunk in chunks:
        states.append(RandomState.now(device))
        with torch.no_grad():
            found.append(encode(chunk))
    vectors = torch.cat(found).requires_grad_()
    backward(vectors)
    if vectors.grad is None:
        return
    gradients = torch.split(vectors.grad, [len(part) for part in found])
    for chunk, state, gradient in zip(chunks, states, gradients, strict=True):
        state.restore()
        again = encode(chunk)
        if again.requires_grad:  # not so where nothing learns: a cosine head on a frozen encoder
            torch.autograd.backward(again, gradient)


def split_step(step: Step, tasks: Mapping[str, Task], rows: int) -> tuple[Step, list[list[Part]]]:
    """What of a step is run as it is, and the contrastive parts with more rows than that, in chunks."""
    whole: list[Part] = []
    chunked: list[list[Part]] = []
    for part in step:
        if tasks[part.task].loss in CONTRASTIVE and len(part.rows) > rows:
            pieces = np.split(part.rows, range(rows, len(part.rows), rows))
            chunked.append([Part(part.task, piece) for piece in pieces])
        else:
            whole.append(part)
    return tuple(whole), chunked
