"""THE TABLE: what a task is made of. A new task is a new row, here or in a recipe's TOML.

A task reads one text or two, from a file's columns, and answers with a class or a number; a contrastive one has no
labels and learns which texts belong together (docs/contrastive.md). Which heads and losses
there are stands here too; which of them go together is checked in `task_checks.py`, and how they compute is in
`model/heads.py` and `training/losses.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["classification", "regression", "pair-classification", "pair-regression", "contrastive", "masked"]
PoolingName = Literal["cls", "pooler", "mean", "max", "weighted"]
PartOfSpeech = Literal["verb", "auxiliary", "noun", "adjective", "adverb", "function", "other"]
View = Literal["first", "second", "third", "joint", "reversed"]
"""A way to read a row: its first text, its second, its third, the first two as one input, the other way round."""


@dataclass(frozen=True)
class Borrow:
    """Rows of another task's training files, trained on as if they had a score here. In a recipe: `[tasks.NAME.borrow]`."""

    task: str
    """A task of the recipe, or a built-in one, that reads two texts."""
    low: float
    high: float
    """Each row's score is drawn uniformly from low to high; where both are equal it is that."""
    only: str = ""
    """Only rows of this class; empty: all of them."""
    fraction: float = 1.0
    """Part of the rows that is taken: a random one, the same throughout the run."""


@dataclass(frozen=True)
class Task:
    """One row of the table. In a recipe: `[tasks.NAME]`, holding only what differs from the built-in of that name."""

    name: str
    kind: Kind
    train: tuple[str, ...] = ()
    """Files, relative to the data folder; all are read. "a.csv|b.tsv" is the first of them that exists, and
    "embedded/a.tsv" one of the sample inside the package."""
    dev: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    """Files without labels, for `minbert submit`."""
    id: str = "id"
    """Column with the row's name; where a file has none, the line number serves."""
    text: str = "sentence"
    """Column with the text, or with the first of two."""
    text2: str = ""
    """Column with the second text of a pair."""
    text3: str = ""
    """Column with a third text, the hard negative of a contrastive task."""
    label: str = "label"
    """Column with the class or the score. A row where it is empty has no label for this task."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in order. A file may hold the names or the numbers from 0."""
    low: float = 0.0
    high: float = 5.0
    """The scale of a score."""
    bounded: bool = True
    """A score beyond the scale becomes its end. False: it is the head's number, wherever that lies."""
    head: str = "linear"
    """See HEADS. On a pair `linear` and `mlp` read both texts as one input. In a recipe a contrastive task has `cosine`
    where it names none."""
    loss: str = ""
    """See LOSSES; empty: the usual one for the kind."""
    metric: str = ""
    """What the best checkpoint is chosen by; empty: accuracy or Pearson."""
    pooling: PoolingName | None = None
    """Replaces the model's pooling for this task."""
    dropout: float | None = None
    """Replaces the model's dropout in this task's head."""
    weight: float = 1.0
    """Factor of this task's loss."""
    hidden: int = 0
    """Width of the head's hidden layer or projection; 0: as wide as the encoder."""
    scale: float = 0.0
    """What a cosine is multiplied with; 0: the top of the scale (5 for classes, 1 for a contrastive task)."""
    threshold: float = 0.0
    """For bce-threshold: scores above it count as 1; for the contrastive losses: the pair belongs together. 0: the
    middle of the scale."""
    temperature: float = 0.0
    """For the contrastive losses: what a cosine is divided by; 0: the usual one of the loss, see CONTRASTIVE."""
    distinct_batches: bool = False
    """For the contrastive losses: no batch holds a text twice, as far as the data allow that; one that comes back would be
    a negative of itself."""
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    """One factor a class for the loss, for instance to undo a skewed training set."""
    normalise: bool = False
    """Lower-case and set punctuation apart, as the CS224N course does."""
    trained: bool = True
    """False: the head is there and is scored, but no step has the task in it."""
    fraction: float = 1.0
    """How much of the training rows an epoch takes: 0.25 a random quarter, drawn anew; 2 each row twice."""
    mask_rate: float = 0.15
    """For masked: how many of the tokens are to be guessed."""
    whole_words: bool = False
    """For masked: all pieces of a word or none."""
    only: str = ""
    """Train on the rows of this class only (its name, or its number); the others are counted. Dev keeps all."""
    negatives: float = 0.0
    """So many training rows are added for each pair: its first text with the second text of another row, and the lowest
    score (or class 0). 0.5: for a random half of the pairs. Never a pair of the train and dev files, in either order and whatever
    its label, nor a text with itself; two texts that no file pairs may still say the same. Drawn once, before training, as by Vinjapuri & Vasireddy: each epoch has the same."""
    negative_kind: Literal["random", "mined"] = "random"
    """Which other row. random: any. mined: a hard one, see data/negatives.py: among the nearest to the first text by the
    encoder that the run starts from, but not the very nearest, which are too often paraphrases that nobody labelled."""
    borrow: Borrow | None = None
    """Rows of another task that are trained on here too."""

    @property
    def is_pair(self) -> bool:
        return self.kind.startswith("pair-") or (not self.has_label and bool(self.text2))

    @property
    def is_contrastive(self) -> bool:
        """Each row says that its texts belong together."""
        return self.kind == "contrastive"

    @property
    def is_masked(self) -> bool:
        """Tokens of the texts are hidden, to be guessed."""
        return self.kind == "masked"

    @property
    def has_label(self) -> bool:
        return not (self.is_contrastive or self.is_masked)

    @property
    def is_classification(self) -> bool:
        return self.kind.endswith("classification")

    @property
    def views(self) -> tuple[View, ...]:
        """How the head wants a row read; of a contrastive task with one column, the same text twice."""
        if self.is_contrastive:
            return ("first", "second", "third") if self.text3 else TWO if self.text2 else ("first", "first")
        if self.is_masked and self.is_pair:
            return ("joint",)
        return HEADS[self.head].pair_views if self.is_pair else ("first",)

    @property
    def answers_pairs(self) -> bool:
        """Whether an answer is about two texts; of a contrastive task it always is, and a masked one has none."""
        return (self.is_pair or self.is_contrastive) and not self.is_masked

    @property
    def answer_views(self) -> tuple[View, ...]:
        """What an answer is made of: what the head reads, but of a contrastive task two texts."""
        return TWO if self.is_contrastive else self.views

    @property
    def has_sigmoid(self) -> bool:
        """Whether the score is a sigmoid of the head's number, laid over the scale."""
        return self.loss in ("bce-threshold", "sigmoid-mse")

    @property
    def outputs(self) -> int:
        """Numbers that the head gives for a row."""
        return len(self.classes) if self.loss == "cross-entropy" else 1

    @property
    def metric_name(self) -> str:
        return self.metric or metric_names(self)[0]


@dataclass(frozen=True)
class HeadRow:
    """What a head reads, and whether it can give one number only."""

    pair_views: tuple[View, ...]
    about: str
    single: bool = False
    """Serves tasks with one text too."""
    one_output: bool = False
    never_negative: bool = False
    compares: bool = False
    """Gives a vector for each text, which a contrastive loss can compare."""
    only_contrastive: bool = False


TWO: tuple[View, ...] = ("first", "second")
BOTH: tuple[View, ...] = ("joint", "reversed")
HEADS = {
    "linear": HeadRow(("joint",), "dropout, linear", single=True),
    "mlp": HeadRow(("joint",), "dropout, linear, ReLU, dropout, linear", single=True),
    "concat": HeadRow(TWO, "[u, v], dropout, linear"),
    "difference": HeadRow(TWO, "u - v, dropout, linear"),
    "absolute-difference": HeadRow(TWO, "|u - v|, dropout, linear"),
    "interaction": HeadRow(TWO, "[|u - v|, u * v], dropout, linear, ReLU, linear"),
    "cosine": HeadRow(TWO, "dropout, cos(u, v) times the scale", one_output=True, compares=True),
    "projected-dot": HeadRow(TWO, "dot product of two projections", one_output=True, compares=True),
    "projected-cosine": HeadRow(
        TWO, "ReLU of the projections' cosine, times the scale", one_output=True, never_negative=True, compares=True
    ),
    "simcse": HeadRow(
        TWO, "cosine; while training, of a linear layer + tanh", one_output=True, compares=True, only_contrastive=True
    ),
    "cosine-1d": HeadRow(TWO, "cosine after a layer to one number (only its sign is left)", one_output=True),
    "ph": HeadRow(BOTH, "both orders, a linear layer each, their logits into a last layer"),
    "dph": HeadRow(BOTH, "ph with a third branch, the difference of the two orders"),
    "dpha": HeadRow(BOTH, "dph with a tanh before the last layer"),
}

REVISIONS = {"ph": 2, "dph": 2, "dpha": 2, "common layer": 2, "sampler mixed": 2}
"""Parts of a model or of its training that compute or begin otherwise than they once did, counted from 1. A run with an earlier one is not what
the same recipe makes now: it is not gone on with, and its result is not compared."""

COSINES = ("cosine", "projected-cosine", "cosine-1d", "simcse")

CONTRASTIVE = {"simcse": 0.05, "mnr": 0.05, "info-nce": 0.007, "info-nce-printed": 0.007}
"""The losses that compare a batch's vectors with each other, and their usual temperatures: SimCSE's, that of
sentence-transformers (a scale of 20), and Gulluk's."""
TOGETHER: tuple[Kind, ...] = ("contrastive", "pair-classification", "pair-regression")

LOSSES: dict[str, tuple[Kind, ...]] = {
    "cross-entropy": ("classification", "pair-classification"),
    "bce": ("classification", "pair-classification"),
    "mse": ("regression", "pair-regression"),
    "sigmoid-mse": ("regression", "pair-regression"),
    "cosine-mse": ("pair-regression",),
    "cosent": ("pair-regression",),
    "bce-threshold": ("regression", "pair-regression"),
    **dict.fromkeys(CONTRASTIVE, TOGETHER),
    "masked-lm": ("masked",),
}


def metric_names(task: Task) -> tuple[str, ...]:
    """What the best checkpoint of a task may be chosen by; the first is the usual one."""
    if task.is_masked:
        return ("masked-accuracy",)
    if task.is_contrastive:
        return ("retrieval",)
    if task.is_classification:
        return ("accuracy", "macro-f1", "mean-class-accuracy", "roc-auc")
    return ("pearson", "spearman")


def counted(scores: Mapping[str, float], tasks: Mapping[str, Task]) -> dict[str, float]:
    """The scores that make a mean. A contrastive or a masked task is a means to the others' end: it counts only where
    there is no other."""
    return {name: score for name, score in scores.items() if tasks[name].has_label} or dict(scores)


FIVE = ("very negative", "negative", "neutral", "positive", "very positive")


def _course(stem: str, split: str) -> tuple[str, ...]:
    return (f"{stem}-{split}.csv|cs224n/{stem}-{split}.csv",)


BUILT_IN = {
    "sst": Task(
        "sst", "classification", _course("ids-sst", "train"), _course("ids-sst", "dev"), _course("ids-sst", "test-student"),
        label="sentiment", classes=FIVE,
    ),
    "cfimdb": Task(
        "cfimdb", "classification", _course("ids-cfimdb", "train"), _course("ids-cfimdb", "dev"),
        _course("ids-cfimdb", "test-student"), label="sentiment", classes=("negative", "positive"),
    ),
    "quora": Task(
        "quora", "pair-classification", ("quora-train.csv|cs224n/quora-train.csv|quora/quora-train.tsv",),
        _course("quora", "dev"), _course("quora", "test-student"),
        text="sentence1", text2="sentence2", label="is_duplicate", classes=("different", "duplicate"),
    ),
    "sts": Task(
        "sts", "pair-regression", _course("sts", "train"), _course("sts", "dev"), _course("sts", "test-student"),
        text="sentence1", text2="sentence2", label="similarity",
    ),
}  # fmt: skip
