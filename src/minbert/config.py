"""A recipe: what to train, on what, how. Frozen dataclasses; each setting is documented once, under its field.

They are read from TOML and written to it by `recipes.py`, and checked as a whole by `recipe_checks.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from minbert.errors import MinbertError, suggest
from minbert.tasks import PoolingName, Task

EMBEDDED = "embedded"
SAMPLE = Path(__file__).parent / "data" / "sample"


@dataclass(frozen=True)
class ModelConfig:
    encoder: str = "minilm"
    """A cached name, a hub id, or a folder in Hugging Face layout."""
    pooling: PoolingName = "cls"
    """How a sequence becomes one vector: cls, pooler, mean, max or weighted (the mean, each token with the weight of its
    word's part of speech; needs the extra "pos", and is not for ONNX Runtime)."""
    pooling_weights: dict[str, float] = field(default_factory=dict)
    """For weighted: verb, auxiliary, noun, adjective, adverb, function (pronouns, prepositions, articles and the like) and
    other (punctuation, numbers, special tokens), for example { verb = 2, auxiliary = 0.5 }; what is not named has 1."""
    dropout: float = 0.1
    """In the heads, where they begin: before a common layer."""
    encoder_dropout: float | None = None
    """In the encoder; without it the published one."""
    common_layer: bool = False
    """A linear layer + tanh that all tasks share, first in every head."""
    common_dropout: float = 0.0
    common_tasks: tuple[str, ...] = ()
    """The tasks that go through the common layer; empty: all."""
    max_tokens: int = 256
    """Longer inputs are cut, and counted."""


@dataclass(frozen=True)
class SamplerConfig:
    kind: Literal[
        "sequential", "round-robin", "proportional", "uniform", "power", "annealed", "weighted", "all", "mixed"
    ] = "proportional"
    """Which task comes next; see data/samplers.py."""
    order: tuple[str, ...] = ()
    """For sequential and round-robin: the tasks in order; one may be named twice. Empty: as the recipe lists them."""
    unit: Literal["dataset", "batch"] = "dataset"
    """For round-robin: whole datasets in turn, or one batch of each."""
    alpha: float = 0.5
    """For power: a task's share is its size to this power (1 proportional, 0 uniform)."""
    weights: dict[str, float] = field(default_factory=dict)
    """For weighted: each task's share, for example quora = 2; what is not named has 1."""
    epoch: Literal["all", "largest"] = "all"
    """For the kinds that draw: an epoch has as many steps as all tasks have batches, or as the largest has."""
    steps_per_epoch: int = 0
    """For the kinds that draw: so many steps instead."""


@dataclass(frozen=True)
class OptimizerConfig:
    kind: Literal["adamw", "radam"] = "adamw"
    lr: float = 2e-5
    """Peak learning rate of the encoder's top layer."""
    head_lr: float | None = None
    """Of the heads; without it the same."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    """Not on biases and LayerNorm."""
    bias_correction: Literal["torch", "course", "none"] = "torch"
    layer_decay: float = 1.0
    """Each layer further down learns slower by this factor."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """After warm-up: stay, or fall to 0 at the end along a line or half a cosine."""
    restart: bool = False
    """For the sampler sequential: warm-up and schedule begin anew with each task's turn."""
    warmup: float = 0.06
    """Part of the steps in which the rate grows from 0."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 leaves it alone."""


@dataclass(frozen=True)
class TrainingConfig:
    epochs: int = 3
    batch_size: int = 32
    """Rows of a batch, at most."""
    batch_tokens: int = 0
    """Tokens of a batch, padding counted, at most; 0: only the rows count."""
    accumulate: int = 1
    """Batches whose gradients are added before a step of the optimizer."""
    cache_rows: int = 0
    """Of a batch with a contrastive loss, rows that are encoded at a time, so that memory does not limit the batch
    (GradCache; costs a second forward pass); 0: all of them at once."""
    mode: Literal["finetune", "pretrain", "unfreeze"] = "finetune"
    """Train everything; only the heads, the encoder frozen; or one more layer each epoch, from the top."""
    loss_weighting: Literal["sum", "mean", "uncertainty"] = "sum"
    """How the losses of one step become one number; each task's `weight` is a factor before that."""
    gradients: Literal["sum", "pcgrad", "gradvac", "cagrad"] = "sum"
    """How the tasks' gradients become one; see training/gradients.py. All but sum need the sampler all or mixed, and run
    the encoder once for each task of a step. With loss_weighting = "mean" they are the mean of what is left of each."""
    gradvac_beta: float = 0.01
    """For gradvac: how fast the angles it aims at follow those it sees."""
    cagrad_c: float = 0.5
    """For cagrad: how far it may go from the mean gradient, in lengths of that; below 1."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, which is then what is evaluated and kept; 0: none."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Of matrix products. auto: fp32 on a CPU; on a GPU bf16, or fp16 where it has no bf16."""
    kernels: Literal["auto", "plain"] = "auto"
    """auto: on a GPU, kernels of our own and steps as CUDA graphs, where they can be used; plain: torch's own."""
    evaluate_every: int = 0
    """Steps between evaluations; 0: at the end of each epoch."""
    max_steps: int = 0
    """At most so many steps: a longer run is thinned evenly, each epoch and each task keeps its share; 0: all."""
    train_sample: int = 1000
    """Training rows of each task that are scored beside dev, to show the gap; 0: none."""
    dev_sample: int = 0
    """Dev rows of each task that are scored while training, to choose by; 0: all. The chosen model is scored on all."""
    best: Literal["mean", "weighted-mean", "any-improves", "task", "per-task", "last"] = "mean"
    """When a checkpoint is the best so far; with last, each is: the model of the last evaluation is the one kept."""
    best_task: str = ""
    """For best = "task": which."""
    best_weights: dict[str, float] = field(default_factory=dict)
    """For best = "weighted-mean": factors; what is not named has 1."""
    patience: int = 0
    """Stop after so many evaluations without a better aggregate; 0: never."""
    checkpoint_every: int = 0
    """Steps between checkpoints to resume from; 0: at evaluations only. Ctrl-C saves one wherever the run is."""
    keep: int = 2
    """Checkpoints kept beside the best model."""
    log_every: int = 20
    """Steps between lines of metrics.jsonl."""
    snapshots: int = 0
    """Models kept in models/step-NUMBER beside the chosen one: those of so many evaluations with the best aggregates."""


@dataclass(frozen=True)
class EnsembleConfig:
    runs: int = 1
    """Trainings of the recipe, with the seeds seed, seed + 1000, ..., so that ensembles of neighbouring seeds share none."""
    models: int = 0
    """The best so many snapshots of all of them, by their aggregates on dev, are the model; 0: no ensemble. Where
    training.snapshots is 0, each run keeps as many as this."""


@dataclass(frozen=True)
class PaperConfig:
    """What a paper reports for the row that a recipe stands for. A number that it does not print is left out."""

    row: str = ""
    """What the paper calls it; empty: the recipe stands for no paper's row."""
    after: str = ""
    """The recipe of the row it was built on, "hillebrand/3-cosine-similarity"; empty: a first one."""
    dev: dict[str, float] = field(default_factory=dict)
    """Scores by task, as printed."""
    test: dict[str, float] = field(default_factory=dict)
    train: dict[str, float] = field(default_factory=dict)
    overall: dict[str, float] = field(default_factory=dict)
    """By split."""
    rule: Literal["2023", "2024"] = "2023"
    """How the overall score is made: the plain mean, or with a correlation r as (r + 1) / 2."""
    note: str = ""
    """Deviations, misprints, and what was guessed because the paper is silent."""


@dataclass(frozen=True)
class Recipe:
    tasks: tuple[Task, ...]
    name: str = "recipe"
    about: str = ""
    data: str = ""
    """Folder of the files; "embedded" is the sample inside the package. --data and MINBERT_DATA say otherwise."""
    seed: int = 1
    model: ModelConfig = ModelConfig()
    sampler: SamplerConfig = SamplerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    stages: tuple[Recipe, ...] = ()
    """What to train before, one after the other, each with its own tasks, sampler, optimizer and training: [[stages]]. A
    stage hands its encoder to the next, and the last of them to the recipe's own tasks; heads start fresh. Its name is
    how --set reaches it: stages.NAME.training.epochs=1."""
    ensemble: EnsembleConfig = EnsembleConfig()
    paper: PaperConfig = PaperConfig()

    def __post_init__(self) -> None:
        """Stages have the seed, the data and the encoder of the whole, also where those were replaced."""
        if self.stages:
            stages = (
                replace(stage, data=self.data, seed=self.seed, model=replace(stage.model, encoder=self.model.encoder))
                for stage in self.stages
            )
            object.__setattr__(self, "stages", tuple(stages))

    @property
    def weighted(self) -> bool:
        """Does a task pool with weights?"""
        return "weighted" in (task.pooling or self.model.pooling for task in self.tasks)

    @property
    def trained(self) -> tuple[Task, ...]:
        """The tasks that steps are made of."""
        return tuple(task for task in self.tasks if task.trained)

    @property
    def turns(self) -> int:
        """Parts of a run of which each is one task's."""
        return len(self.sampler.order or self.trained) if self.sampler.kind == "sequential" else 1

    def task(self, name: str) -> Task:
        for task in self.tasks:
            if task.name == name:
                return task
        names = [task.name for task in self.tasks]
        raise MinbertError(f'no task "{name}"{suggest(name, names)}; this recipe has: {", ".join(names)}')


def data_folder(recipe: Recipe, chosen: str | Path | None = None) -> Path:
    """Where the recipe's files lie: what the caller chose, the embedded sample, MINBERT_DATA, or the recipe's own."""
    if chosen is not None:
        return SAMPLE if str(chosen) == EMBEDDED else Path(chosen)
    if recipe.data == EMBEDDED:
        return SAMPLE
    return Path(os.environ.get("MINBERT_DATA") or recipe.data or "data")
