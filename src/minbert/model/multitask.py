"""One encoder and a head for each task.

model = MultitaskModel(encoder, tasks, pooling="cls")
outputs = model(ready(batch, encoder)) # {"sst": (rows, 5), "sts": (rows, 1)}: the encoder ran once
answers = outputs_of(model, inputs)    # a whole split, length-sorted, without gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from minbert.data.batches import plan_batches
from minbert.data.inputs import Batch, Inputs
from minbert.data.tokenizer import Tokens
from minbert.errors import MinbertError
from minbert.model.encoder import Encoder, Pooling, initialise
from minbert.model.heads import build_head
from minbert.model.packed import Packed, pack
from minbert.model.runner import Runner, make_runner
from minbert.tasks import Task

TOKEN_BUDGET = {"cpu": 2048, "cuda": 65536}  # of an inference batch: a CPU is fastest while it fits the caches


class MultitaskModel(nn.Module):
    """Encoder, pooling, an optional common layer, heads.

    Args:
        encoder: shared by all tasks.
        tasks: a head is built for each.
        pooling: how a sequence becomes one vector, where a task does not say otherwise.
        dropout: in the heads.
        common_layer: a linear layer + tanh that tasks share, before their heads (Mohammed & Sabane's CL).
        common_tasks: which tasks go through it; empty: all.
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
        common_tasks: Iterable[str] = (),
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
        self.common_tasks = frozenset(common_tasks) or frozenset(self.tasks)
        self.heads = nn.ModuleDict({name: build_head(task, width, dropout) for name, task in self.tasks.items()})
        for module in (self.common, self.heads):
            if module is not None:
                initialise(module, generator)
        self.runner: Runner = make_runner(encoder, "fp32", kernels="plain")

    @property
    def device(self) -> torch.device:
        return self.encoder.embeddings.tokens.weight.device

    def use(self, precision: str = "fp32", *, kernels: str = "auto") -> MultitaskModel:
        """Run the encoder so from now on: see `runner.make_runner`. To be called again after a move to another device."""
        self.runner = make_runner(self.encoder, precision, kernels=kernels)
        return self

    def forward(self, batch: Ready) -> dict[str, Tensor]:
        """What each task's head says of its rows, (rows, outputs)."""
        pooled = self.runner(batch.packed, {self.poolings[part.task] for part in batch.parts})
        outputs = {}
        for part in batch.parts:
            views, rows = part.index.shape
            vectors = pooled[self.poolings[part.task]].index_select(0, part.index.view(-1))
            outputs[part.task] = self.answer(part.task, *vectors.view(views, rows, -1))
        return outputs

    def answer(self, task: str, *views: Tensor) -> Tensor:
        """A head's outputs from the pooled vectors of its views."""
        if self.common is not None and task in self.common_tasks:
            views = tuple(self.common(view) for view in views)
        return self.heads[task](*views)


@dataclass(frozen=True, eq=False)
class ReadyPart:
    """A task's rows of a batch, on the device."""

    task: str
    index: Tensor
    """(views, rows): the sequence that is view v of row i."""
    labels: Tensor
    """(rows,); not a number where a row of a fixed layout is not used."""


@dataclass(frozen=True, eq=False)
class Ready:
    """A batch on its device."""

    packed: Packed
    parts: tuple[ReadyPart, ...]


def ready(batch: Batch, encoder: Encoder) -> Ready:
    """The batch on the encoder's device."""
    device = encoder.embeddings.tokens.weight.device
    parts = [
        ReadyPart(part.task, torch.from_numpy(part.index).to(device), torch.from_numpy(part.labels).to(device))
        for part in batch.parts
    ]
    return Ready(pack(batch.tokens, encoder.config, device), tuple(parts))


@torch.inference_mode()
def encode_pooled(
    runner: Runner, tokens: Tokens, poolings: Iterable[Pooling], *, progress: Callable[[int], None] | None = None
) -> dict[Pooling, NDArray[np.float32]]:
    """Each sequence encoded once and pooled in every way asked for, (sequences, width), in the sequences' order."""
    encoder = runner.encoder
    device = encoder.embeddings.tokens.weight.device
    budget = TOKEN_BUDGET.get(device.type, 16384)
    pooled = {how: torch.empty((len(tokens), encoder.config.width), device=device) for how in poolings}
    runner.refresh()
    for rows in plan_batches(tokens.lengths, tokens=budget):
        packed = pack(tokens.take(rows), encoder.config, device)
        where = torch.from_numpy(rows).to(device)
        for how, vectors in runner(packed, pooled.keys()).items():
            pooled[how][where] = vectors
        if progress is not None:
            progress(len(rows))
    return {how: vectors.cpu().numpy() for how, vectors in pooled.items()}


@torch.inference_mode()
def outputs_of(model: MultitaskModel, inputs: Inputs) -> NDArray[np.float32]:
    """A task's outputs for a whole split, (rows, outputs), in order. The model must be in eval mode."""
    how = model.poolings[inputs.task.name]
    views = [encode_pooled(model.runner, view, [how])[how] for view in inputs.views]
    return answer_pooled(model, inputs.task.name, views)


@torch.inference_mode()
def answer_pooled(model: MultitaskModel, task: str, views: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    """A head's outputs from pooled vectors that `encode_pooled` made."""
    moved = [torch.from_numpy(np.ascontiguousarray(view)).to(model.device) for view in views]
    return model.answer(task, *moved).float().cpu().numpy()
