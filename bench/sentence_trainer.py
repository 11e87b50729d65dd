"""sentence-transformers' own trainer on the two pair tasks, over the very batches that ours has.

CosineSimilarityLoss on mean-pooled vectors, bf16 on a GPU, torch's fused AdamW, worker processes and pinned memory, and
FlashAttention with unpadded inputs where it is installed. Its batch samplers do not group by length, so it is given a
multi-dataset batch sampler, through its documented seam, that hands out our batches. It tokenizes on the way, in the
workers, and its per-step check of the loss, which would wait for the device, is off.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from bench.huggingface import WARM_UP, WORKERS
from bench.measure import Stopwatch, Timed, Timing, fresh_memory, peak_memory
from bench.mix import Mix, Workload
from bench.models import Model


class NotInstalledError(Exception):
    """Why this peer cannot run here."""


def time_sentence_transformers(mix: Mix, workload: Workload, model: Model, device: torch.device) -> Timed:
    for name in ("sentence_transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise NotInstalledError(f"{name.replace('_', '-')} is not installed")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.disable(logging.WARNING)
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    fresh_memory(device)
    gpu, timing = device.type == "cuda", workload.timing
    warm_up = min(timing.warm_up, WARM_UP)
    watch = Stopwatch(Timing(warm_up, timing.rounds, timing.steps), device)
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[device] if gpu else []):
        trainer, notes = _trainer(mix, workload, model, device, watch, Path(folder))
        trainer.train()
    return Timed(tuple(watch.seconds), peak_memory(device), notes)


def _trainer(
    mix: Mix, workload: Workload, model: Model, device: torch.device, watch: Stopwatch, folder: Path
) -> tuple[Any, dict[str, Any]]:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
        models,
    )
    from transformers import PrinterCallback, TrainerCallback

    class Keeper(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            watch.tick(state.global_step)

    class Trainer(SentenceTransformerTrainer):
        def add_model_card_callback(self, *_: Any, **__: Any) -> None:
            """No model card: it looks through the data before training starts."""

    installed = importlib.util.find_spec("datasets") is not None
    dataset, dataset_dict = _dataset_classes(installed, SentenceTransformerTrainer)
    gpu = device.type == "cuda"
    flash = gpu and importlib.util.find_spec("flash_attn") is not None and model.shape.kind == "bert"
    chosen = {"model_kwargs": {"attn_implementation": "flash_attention_2"}} if flash else {}
    words = models.Transformer(str(model.folder), **chosen)
    words.max_seq_length = workload.recipe.model.max_tokens
    pooling = models.Pooling(model.shape.width, pooling_mode="mean")
    network = SentenceTransformer(modules=[words, pooling], device=device.type)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=watch.timing.total,
        per_device_train_batch_size=workload.recipe.training.batch_size,
        multi_dataset_batch_sampler=_batches(workload, watch.timing),
        bf16=gpu,
        use_cpu=not gpu,
        optim="adamw_torch_fused",
        dataloader_num_workers=WORKERS if gpu else 0,
        dataloader_prefetch_factor=4 if gpu else None,
        dataloader_pin_memory=gpu,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
    )
    rows = dataset_dict({name: dataset.from_dict(columns) for name, columns in _columns(mix).items()})
    trainer = Trainer(
        model=network,
        args=arguments,
        train_dataset=rows,
        loss=losses.CosineSimilarityLoss(network),
        callbacks=[Keeper()],
    )
    trainer.remove_callback(PrinterCallback)
    config = getattr(getattr(words, "auto_model", None) or getattr(words, "model", None), "config", None)
    return trainer, {
        "attention": getattr(config, "_attn_implementation", None),
        "num_workers": arguments.dataloader_num_workers,
        "rows": "datasets.Dataset" if installed else "a list in memory: the package datasets is not installed",
    }


def _columns(mix: Mix) -> dict[str, dict[str, list[Any]]]:
    """The pairs with their scores brought to 0..1."""
    found: dict[str, dict[str, list[Any]]] = {}
    for task in mix.recipe.tasks:
        examples, labels = mix.examples[task.name], mix.inputs[task.name].labels
        assert examples.pairs is not None and labels is not None
        scores = [(float(label) - task.low) / (task.high - task.low) for label in labels]
        found[task.name] = {"sentence1": list(examples.texts), "sentence2": list(examples.pairs), "score": scores}
    return found


def _batches(workload: Workload, timing: Timing) -> Any:
    """A multi-dataset batch sampler that hands out the workload's steps."""
    from sentence_transformers.sampler import MultiDatasetDefaultBatchSampler

    steps = workload.steps[workload.timing.total - timing.total :]
    sizes = [len(inputs) for inputs in workload.inputs.values()]
    starts = dict(zip(workload.inputs, accumulate(sizes, initial=0), strict=False))

    class Batches(MultiDatasetDefaultBatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            for (part,) in steps:
                yield [starts[part.task] + int(row) for row in part.rows]

        def __len__(self) -> int:
            return len(steps)

    return Batches


class ListDataset:
    """Rows in memory with as much of datasets.Dataset's interface as the trainer asks for."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self.columns = columns

    @classmethod
    def from_dict(cls, columns: Mapping[str, list[Any]]) -> ListDataset:
        return cls(columns)

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: values[row] for name, values in self.columns.items()}


class ListDatasets(dict[str, ListDataset]):
    pass


class _Unused:
    """Stands for the classes that no row here is an instance of."""


def _dataset_classes(installed: bool, trainer: type) -> tuple[Any, Any]:
    """datasets.Dataset and DatasetDict; without that package, lists in memory, which the trainer is told to accept."""
    if installed:
        from datasets import Dataset, DatasetDict

        return Dataset, DatasetDict
    for kind in trainer.__mro__:
        module = sys.modules[kind.__module__]
        if module.__name__.startswith("sentence_transformers."):
            vars(module).update(
                Dataset=ListDataset,
                DatasetDict=ListDatasets,
                IterableDataset=_Unused,
                IterableDatasetDict=_Unused,
                is_training_available=lambda: True,
            )
    return ListDataset, ListDatasets
