"""One encoder and a head for each task.

model = MultitaskModel(encoder, tasks, pooling="cls")
outputs = model(ready(batch, encoder)) # {"sst": (rows, 5), "sts": (rows, 1)}: the encoder ran once; for a task with a
                                       # contrastive loss the vectors that it compares, side by side
answers = outputs_of(model, inputs)    # a whole split, length-sorted, without gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from minbert.data.batches import plan_batches
from minbert.data.inputs import Batch, Inputs
from minbert.data.tokenizer import Tokens, ranges
from minbert.errors import MinbertError
from minbert.model.encoder import Encoder, Pooling, initialise
from minbert.model.heads import BothOrders, Compares, Vocabulary, build_head
from minbert.model.packed import Packed, pack
from minbert.model.runner import LOW, Runner, make_runner
from minbert.tasks import BOTH, CONTRASTIVE, HEADS, Task

TOKEN_BUDGET = {"cpu": 2048, "cuda": 65536}  # of an inference batch: a CPU is fastest while it fits the caches


class MultitaskModel(nn.Module):
    """Encoder, pooling, an optional common layer, heads.

    Args:
        encoder: shared by all tasks.
        tasks: a head is built for each.
        pooling: how a sequence becomes one vector, where a task does not say otherwise.
        dropout: in the heads, where they begin.
        common_layer: a linear layer + tanh that tasks share, the first of their heads (Mohammed & Sabane's CL).
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
        self.poolings: dict[str, Pooling] = {
            name: "tokens" if task.is_masked else task.pooling or pooling for name, task in self.tasks.items()
        }
        self.common = (
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(common_dropout)) if common_layer else None
        )
        shared = self.tasks.values() if common_layer else ()
        self.common_tasks = {task.name for task in shared if task.name in (common_tasks or self.tasks)}
        self.dropouts = nn.ModuleDict()  # of heads that begin with the common layer: before it, and none later
        self.heads = nn.ModuleDict()
        for name, task in self.tasks.items():
            own = task
            if name in self.common_tasks and not task.is_masked and task.views != BOTH:
                self.dropouts[name] = nn.Dropout(dropout if task.dropout is None else task.dropout)
                own = replace(task, dropout=0.0)
            self.heads[name] = Vocabulary(encoder.config) if task.is_masked else build_head(own, width, dropout)
        for module in (self.common, self.heads):
            if module is not None:
                initialise(module, generator)
        for head in self.heads.values():
            if isinstance(head, BothOrders):
                head.initialise(generator)
        self.runner: Runner = make_runner(encoder, "fp32", kernels="plain")
        self.dtype = torch.float32  # of the product with the token table

    @property
    def device(self) -> torch.device:
        return self.encoder.embeddings.tokens.weight.device

    def use(self, precision: str = "fp32", *, kernels: str = "auto") -> MultitaskModel:
        """Run the encoder so from now on: see `runner.make_runner`. To be called again after a move to another device."""
        self.runner = make_runner(self.encoder, precision, kernels=kernels)
        self.dtype = LOW.get(precision, torch.float32)
        return self

    def forward(self, batch: Ready) -> dict[str, Tensor]:
        """What each task's loss reads: what its head says of its rows, (rows, outputs), or, where the loss is a
        contrastive one, the vectors that the head compares, (rows, views * dim)."""
        pooled = self.runner(batch.packed, {self.poolings[part.task] for part in batch.parts})
        outputs = {}
        for how, vectors in pooled.items():
            parts = [part for part in batch.parts if self.poolings[part.task] == how]
            index = [part.index.view(-1) for part in parts]
            chosen = vectors.index_select(0, torch.cat(index) if len(index) > 1 else index[0])  # of all parts at once
            for part, rows in zip(parts, torch.split(chosen, [len(one) for one in index]), strict=True):
                say = self.vectors if self.tasks[part.task].loss in CONTRASTIVE else self.answer
                outputs[part.task] = say(part.task, *rows.view(*part.index.shape, rows.shape[-1]))
        return {part.task: outputs[part.task] for part in batch.parts}

    def vectors(self, task: str, *views: Tensor) -> Tensor:
        """The vectors that a head compares, side by side, from the pooled ones; of a head that compares none, what it
        reads."""
        head = self.heads[task]
        if self.common is not None and task in self.common_tasks:  # no dropout: the encoder's is noise enough
            views = tuple(self.common(view) for view in views)
        if HEADS[self.tasks[task].head].compares:
            views = tuple(cast("Compares", head).vector(view) for view in views)
        return torch.cat(views, dim=-1)

    def answer(self, task: str, *views: Tensor) -> Tensor:
        """A head's outputs from the pooled vectors of its views; a masked task's from the tokens to guess."""
        head = self.heads[task]
        if isinstance(head, Vocabulary):
            return head(*views, self.encoder.embeddings.tokens.weight, self.dtype)
        if self.common is None or task not in self.common_tasks:
            return head(*views)
        if isinstance(head, BothOrders):
            return head(*views, first=self.common)
        return head(*(self.common(self.dropouts[task](view)) for view in views))


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


Encode = Callable[[Tokens, Iterable[Pooling]], Mapping[Pooling, NDArray[np.float32]]]
"""Sequences to pooled vectors, as `encode_pooled` does."""


@torch.inference_mode()
def outputs_of(model: MultitaskModel, inputs: Inputs, encode: Encode | None = None) -> NDArray[np.float32]:
    """A task's outputs for a whole split, (rows, outputs), in order. The model must be in eval mode.

    A contrastive task is judged by whole splits, so there they are the vectors of both texts, (rows, 2 * dim). Of a masked
    task they are how many of a row's tokens were guessed right, and the loss of them all together.
    """
    if inputs.masking is not None:
        return _guesses(model, inputs)
    task, how = inputs.task, model.poolings[inputs.task.name]
    encode = encode or partial(encode_pooled, model.runner)
    pooled = {view: encode(view, [how])[how] for view in dict.fromkeys(inputs.answer_views)}  # each once
    say = vectors_pooled if task.is_contrastive else answer_pooled
    return say(model, task.name, [pooled[view] for view in inputs.answer_views])


GUESSES = 2048  # tokens guessed at once: each has a logit for every word


def _guesses(model: MultitaskModel, inputs: Inputs) -> NDArray[np.float32]:
    hidden, device = inputs.hidden, model.device
    found = np.zeros((len(inputs), 2), np.float64)
    model.runner.refresh()
    for rows in plan_batches(hidden.tokens.lengths, tokens=TOKEN_BUDGET.get(device.type, 16384)):
        lengths = hidden.tokens.lengths_at(rows)
        source = np.repeat(hidden.tokens.offsets[rows], lengths) + ranges(lengths)
        places = np.flatnonzero(hidden.guessed[source])
        vectors = model.runner(pack(hidden.tokens.take(rows), model.encoder.config, device), ["tokens"])["tokens"]
        for start in range(0, len(places), GUESSES):
            some = places[start : start + GUESSES]
            wanted = torch.from_numpy(hidden.ids[source[some]].astype(np.int64)).to(device)
            logits = model.answer(inputs.task.name, vectors.index_select(0, torch.from_numpy(some).to(device)))
            right = (logits.argmax(-1) == wanted).double()
            losses = F.cross_entropy(logits, wanted, reduction="none").double()
            np.add.at(found, np.repeat(rows, lengths)[some], torch.stack([right, losses], dim=1).cpu().numpy())
    return found.astype(np.float32)


@torch.inference_mode()
def answer_pooled(model: MultitaskModel, task: str, views: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    """A head's outputs from pooled vectors that `encode_pooled` made."""
    return model.answer(task, *_moved(model, views)).float().cpu().numpy()


@torch.inference_mode()
def vectors_pooled(model: MultitaskModel, task: str, views: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The vectors that a head compares, side by side, from the same."""
    return model.vectors(task, *_moved(model, views)).float().cpu().numpy()


def _moved(model: MultitaskModel, views: Iterable[NDArray[np.float32]]) -> list[Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(view)).to(model.device) for view in views]
