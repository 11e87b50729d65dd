"""One encoder and a head for each task.

model = MultitaskModel(encoder, tasks, pooling="cls")
outputs = model(batch)                 # {"sst": (rows, 5), "sts": (rows, 1)}: the encoder ran once
answers = outputs_of(model, inputs)    # a whole split, length-sorted, without gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from minbert.data.batches import Padded, pad, plan_batches
from minbert.data.inputs import Batch, Inputs
from minbert.data.tokenizer import Tokens
from minbert.errors import MinbertError
from minbert.model.encoder import Encoder, Pooling, initialise, pool
from minbert.model.heads import build_head
from minbert.tasks import Task

TOKEN_BUDGET = {"cpu": 2048, "cuda": 65536}  # of an inference batch: a CPU is fastest while it fits the caches


class MultitaskModel(nn.Module):
    """Encoder, pooling, an optional common layer, heads.

    Args:
        encoder: shared by all tasks.
        tasks: a head is built for each.
        pooling: how a sequence becomes one vector, where a task does not say otherwise.
        dropout: in the heads.
        common_layer: a linear layer + tanh that all tasks share, before every head (Mohammed & Sabane's CL).
        generator: where the heads' initial weights come from.
    """

    def __init__(
        self,
        encoder: Encoder,
        tasks: Iterable[Task],
        *,
        pooling: Pooling = "cls",
        dropout: float = 0.1,
        common_layer: bool = False,
        common_dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        width = encoder.config.width
        self.encoder = encoder
        self.tasks = {task.name: task for task in tasks}
        for name in self.tasks:
            if not name or "." in name or hasattr(nn.ModuleDict(), name):
                raise MinbertError(f'a task is named "{name}"; expected a name without dots that is no word of torch')
        self.poolings: dict[str, Pooling] = {name: task.pooling or pooling for name, task in self.tasks.items()}
        self.common = (
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(common_dropout)) if common_layer else None
        )
        self.heads = nn.ModuleDict({name: build_head(task, width, dropout) for name, task in self.tasks.items()})
        for module in (self.common, self.heads):
            if module is not None:
                initialise(module, generator)

    @property
    def device(self) -> torch.device:
        return self.encoder.embeddings.tokens.weight.device

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """What each task's head says of its rows, (rows, outputs)."""
        ids, mask, segments = tensors(batch.padded, self.encoder)
        hidden = self.encoder(ids, mask, segments)  # (sequences, tokens, width)
        outputs = {}
        for part in batch.parts:
            mine = slice(part.start, part.start + part.rows * part.views)
            vectors = self.vectors(part.task, hidden[mine], None if mask is None else mask[mine])
            outputs[part.task] = self.answer(part.task, *vectors.chunk(part.views))
        return outputs

    def vectors(self, task: str, hidden: Tensor, mask: Tensor | None) -> Tensor:
        return pool(hidden, mask, self.poolings[task], self.encoder.pooler)

    def answer(self, task: str, *views: Tensor) -> Tensor:
        """A head's outputs from the pooled vectors of its views."""
        if self.common is not None:
            views = tuple(self.common(view) for view in views)
        return self.heads[task](*views)


def tensors(padded: Padded, encoder: Encoder) -> tuple[Tensor, Tensor | None, Tensor]:
    """A padded batch on the encoder's device. Without any padding there is no mask: attention is faster so."""
    device = encoder.embeddings.tokens.weight.device
    whole = bool(padded.mask.all())
    moved = [torch.from_numpy(array) for array in (padded.ids, padded.segments, *(() if whole else (padded.mask,)))]
    if device.type == "cuda":
        encoder.check_ids(moved[0])  # there, it would cost a wait for the device
        moved = [tensor.pin_memory().to(device, non_blocking=True) for tensor in moved]
    return moved[0], None if whole else moved[2], moved[1]


@torch.inference_mode()
def encode_pooled(
    encoder: Encoder, tokens: Tokens, poolings: Iterable[Pooling], *, progress: Callable[[int], None] | None = None
) -> dict[Pooling, NDArray[np.float32]]:
    """Each sequence encoded once and pooled in every way asked for, (sequences, width), in the sequences' order."""
    device = encoder.embeddings.tokens.weight.device
    budget = TOKEN_BUDGET.get(device.type, 16384)
    pooled = {how: torch.empty((len(tokens), encoder.config.width), device=device) for how in poolings}
    for rows in plan_batches(tokens.lengths, tokens=budget):
        ids, mask, segments = tensors(pad(tokens, rows, encoder.config.pad_id), encoder)
        hidden = encoder(ids, mask, segments)
        where = torch.from_numpy(rows).to(device)
        for how, vectors in pooled.items():
            vectors[where] = pool(hidden, mask, how, encoder.pooler).float()
        if progress is not None:
            progress(len(rows))
    return {how: vectors.cpu().numpy() for how, vectors in pooled.items()}


@torch.inference_mode()
def outputs_of(model: MultitaskModel, inputs: Inputs) -> NDArray[np.float32]:
    """A task's outputs for a whole split, (rows, outputs), in order. The model must be in eval mode."""
    how = model.poolings[inputs.task.name]
    views = [encode_pooled(model.encoder, view, [how])[how] for view in inputs.views]
    return answer_pooled(model, inputs.task.name, views)


@torch.inference_mode()
def answer_pooled(model: MultitaskModel, task: str, views: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    """A head's outputs from pooled vectors that `encode_pooled` made."""
    moved = [torch.from_numpy(np.ascontiguousarray(view)).to(model.device) for view in views]
    return model.answer(task, *moved).float().cpu().numpy()
