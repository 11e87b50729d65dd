"""The peer that everybody writes: a plain training loop around transformers.AutoModel.

A linear head for each task on the first token's vector, the attention that transformers chooses (sdpa where a model has
it), dynamic padding by its own collator (to a multiple of 8 on a GPU, as its documentation advises), bf16 autocast on a
GPU, torch's fused AdamW, clipping. Texts are tokenized ahead and batches are ours, grouped by length; on a GPU worker
processes collate and pin them. There is no logging and no schedule.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench.measure import Stopwatch, Timed, Timing, fresh_memory, peak_memory
from bench.mix import Workload
from bench.models import Model
from minbert.data.inputs import Inputs
from minbert.data.streams import Step
from minbert.tasks import Task

WARM_UP = 20  # steps: nothing is captured or compiled here
WORKERS = 4  # processes that collate for a GPU; on a CPU they would take the cores that compute
Row = tuple[str, int]


class Rows(Dataset[dict[str, Any]]):
    """Tokenized rows by task and number."""

    def __init__(self, inputs: Mapping[str, Inputs], steps: list[Step], *, segments: bool) -> None:
        self.rows: dict[Row, dict[str, Any]] = {}
        for part in (part for step in steps for part in step):
            (tokens,) = inputs[part.task].views
            labels = inputs[part.task].labels
            assert labels is not None
            for row in np.unique(part.rows):
                ids, kinds = tokens[row]
                found = {"input_ids": ids.tolist(), "label": float(labels[row]), "task": part.task}
                self.rows[part.task, int(row)] = found | ({"token_type_ids": kinds.tolist()} if segments else {})

    def __getitem__(self, key: Row) -> dict[str, Any]:
        return self.rows[key]


class Collator:
    """transformers' collator over the rows of a step, which are of one task."""

    def __init__(self, tokenizer: Any, multiple: int | None) -> None:
        from transformers import DataCollatorWithPadding

        self.pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)

    def __call__(self, rows: list[dict[str, Any]]) -> tuple[str, dict[str, Tensor]]:
        kept = [{key: value for key, value in row.items() if key != "task"} for row in rows]
        return rows[0]["task"], dict(self.pad(kept))


class Heads(nn.Module):
    """AutoModel and a linear layer for each task."""

    def __init__(self, encoder: nn.Module, width: int, tasks: tuple[Task, ...], dropout: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.heads = nn.ModuleDict({task.name: nn.Linear(width, max(1, len(task.classes))) for task in tasks})
        self.losses = nn.ModuleDict({task.name: loss_of(task) for task in tasks})

    def forward(self, task: str, labels: Tensor, **inputs: Tensor) -> Tensor:
        first = self.encoder(**inputs).last_hidden_state[:, 0]  # (rows, width)
        outputs = self.heads[task](self.dropout(first)).float()
        if outputs.shape[1] == 1:
            return self.losses[task](outputs[:, 0], labels.float())
        return self.losses[task](outputs, labels.long())


def loss_of(task: Task) -> nn.Module:
    if not task.is_classification:
        return nn.MSELoss()
    weight = torch.tensor(task.class_weights) if task.class_weights else None
    return nn.CrossEntropyLoss(weight=weight, label_smoothing=task.label_smoothing)


def time_huggingface(workload: Workload, model: Model, device: torch.device) -> Timed:
    """The workload's timed steps, after the last few of its warm-up."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it warns of worker processes otherwise
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    fresh_memory(device)
    gpu = device.type == "cuda"
    timing = workload.timing
    warm_up = min(timing.warm_up, WARM_UP)
    steps = workload.steps[timing.warm_up - warm_up :]
    dropout = workload.recipe.model.dropout
    chosen = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "add_pooling_layer": False}
    encoder = AutoModel.from_pretrained(model.folder, **chosen)
    network = Heads(encoder, model.shape.width, workload.recipe.tasks, dropout).to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=workload.recipe.optimizer.lr, weight_decay=0.01, fused=True)
    watch = Stopwatch(Timing(warm_up, timing.rounds, timing.steps), device)
    collator = Collator(AutoTokenizer.from_pretrained(model.folder), 8 if gpu else None)
    workers: dict[str, Any] = {"num_workers": WORKERS, "prefetch_factor": 4, "pin_memory": True} if gpu else {}
    loader = DataLoader(
        Rows(workload.inputs, steps, segments=model.shape.kind == "bert"),
        batch_sampler=list(_keys(steps)),  # any iterable of batches serves
        collate_fn=collator,
        **workers,
    )
    for number, (task, batch) in enumerate(loader, start=1):
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            loss = network(task, **moved)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if watch.tick(number):
            break
    attention = getattr(encoder.config, "_attn_implementation", None)
    return Timed(tuple(watch.seconds), peak_memory(device), {"attention": attention, **workers})


def _keys(steps: list[Step]) -> Iterator[list[Row]]:
    for step in steps:
        (part,) = step  # the mix has one task a step
        yield [(part.task, int(row)) for row in part.rows]
