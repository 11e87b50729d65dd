"""THE TABLE: what a task is made of. A new task is a new row, here or in a recipe's TOML.

A task reads one text or two, from a file's columns, and answers with a class or a number. Which heads and losses
there are, and which go together, stands here too, so that a recipe that asks for nonsense is refused when it is read
and not after an hour of training. How they compute is in `model/heads.py` and `training/losses.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minbert.errors import MinbertError, suggest

Kind = Literal["classification", "regression", "pair-classification", "pair-regression"]
PoolingName = Literal["cls", "pooler", "mean", "max"]
View = Literal["first", "second", "joint", "reversed"]
"""A way to read a row: its first text, its second, both as one input, both the other way round."""


@dataclass(frozen=True)
class Task:
    """One row of the table. In a recipe: `[tasks.NAME]`, holding only what differs from the built-in of that name."""

    name: str
    kind: Kind
    train: tuple[str, ...] = ()
    """Files, relative to the data folder; all are read. "a.csv|b.tsv" is the first of them that exists."""
    dev: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    """Files without labels, for `minbert submit`."""
    id: str = "id"
    """Column with the row's name; where a file has none, the line number serves."""
    text: str = "sentence"
    """Column with the text, or with the first of two."""
    text2: str = ""
    """Column with the second text of a pair."""
    label: str = "label"
    """Column with the class or the score. A row where it is empty has no label for this task."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in order. A file may hold the names or the numbers from 0."""
    low: float = 0.0
    high: float = 5.0
    """The scale of a score."""
    head: str = "linear"
    """See HEADS. On a pair `linear` and `mlp` read both texts as one input."""
    loss: str = ""
    """See LOSSES; empty: the usual one for the kind."""
    metric: str = ""
    """What the best checkpoint is chosen by; empty: accuracy or Pearson."""
    pooling: PoolingName | None = None
    """Replaces the model's pooling for this task."""
    weight: float = 1.0
    """Factor of this task's loss."""
    hidden: int = 0
    """Width of the head's hidden layer or projection; 0: as wide as the encoder."""
    scale: float = 0.0
    """What a cosine is multiplied with; 0: the top of the scale (5 for classes)."""
    threshold: float = 0.0
    """For bce-threshold: scores above it count as 1; 0: the middle of the scale."""
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    """One factor a class for the loss, for instance to undo a skewed training set."""
    normalise: bool = False
    """Lower-case and set punctuation apart, as the CS224N course does."""
    trained: bool = True
    """False: the head is there and is scored, but no step has the task in it."""
    fraction: float = 1.0
    """How much of the training rows an epoch takes: 0.25 a random quarter, drawn anew; 2 each row twice."""

    @property
    def is_pair(self) -> bool:
        return self.kind.startswith("pair-")

    @property
    def is_classification(self) -> bool:
        return self.kind.endswith("classification")

    @property
    def views(self) -> tuple[View, ...]:
        """How the head wants a row read."""
        return HEADS[self.head].pair_views if self.is_pair else ("first",)

    @property
    def outputs(self) -> int:
        """Numbers that the head gives for a row."""
        return len(self.classes) if self.loss == "cross-entropy" else 1

    @property
    def metric_name(self) -> str:
        return self.metric or ("accuracy" if self.is_classification else "pearson")


@dataclass(frozen=True)
class HeadRow:
    """What a head reads, and whether it can give one number only."""

    pair_views: tuple[View, ...]
    about: str
    single: bool = False
    """Serves tasks with one text too."""
    one_output: bool = False
    never_negative: bool = False


TWO: tuple[View, ...] = ("first", "second")
BOTH: tuple[View, ...] = ("joint", "reversed")
HEADS = {
    "linear": HeadRow(("joint",), "dropout, linear", single=True),
    "mlp": HeadRow(("joint",), "dropout, linear, ReLU, dropout, linear", single=True),
    "concat": HeadRow(TWO, "[u, v], dropout, linear"),
    "difference": HeadRow(TWO, "u - v, dropout, linear"),
    "interaction": HeadRow(TWO, "[|u - v|, u * v], dropout, linear, ReLU, linear"),
    "cosine": HeadRow(TWO, "cos(u, v) times the scale", one_output=True),
    "projected-dot": HeadRow(TWO, "dot product of two projections", one_output=True),
    "projected-cosine": HeadRow(
        TWO, "ReLU of the projections' cosine, times the scale", one_output=True, never_negative=True
    ),
    "cosine-1d": HeadRow(TWO, "cosine after a layer to one number (only its sign is left)", one_output=True),
    "ph": HeadRow(BOTH, "both orders, a linear layer each, their logits into a last layer"),
    "dph": HeadRow(BOTH, "ph with a third branch, the difference of the two orders"),
    "dpha": HeadRow(BOTH, "dph with a tanh before the last layer"),
}

COSINES = ("cosine", "projected-cosine", "cosine-1d")

LOSSES: dict[str, tuple[Kind, ...]] = {
    "cross-entropy": ("classification", "pair-classification"),
    "bce": ("classification", "pair-classification"),
    "mse": ("regression", "pair-regression"),
    "cosine-mse": ("pair-regression",),
    "cosent": ("pair-regression",),
    "bce-threshold": ("regression", "pair-regression"),
}
METRIC_NAMES = {
    True: ("accuracy", "macro-f1", "mean-class-accuracy", "roc-auc"),
    False: ("pearson", "spearman"),
}

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


def check_task(task: Task) -> Task:
    """The task with its defaults filled in, or an error that says what does not go together."""
    where = f"[tasks.{task.name}]"
    if not task.name.strip() or not task.name.isprintable() or set(task.name) & set("/\\.*"):  # it names files
        raise MinbertError(f'a task is named "{task.name}"; expected a name without / \\ . and *')
    if task.is_pair and not task.text2:
        raise MinbertError(f"{where} text2 is empty; a {task.kind} task reads two columns")
    if not task.is_pair and task.text2:
        raise MinbertError(f'{where} text2 is "{task.text2}"; a {task.kind} task reads one column')
    if task.is_classification and len(task.classes) < 2:
        raise MinbertError(f"{where} classes has {len(task.classes)} names; expected two or more")
    if len(set(task.classes)) != len(task.classes):
        raise MinbertError(f"{where} classes names one twice: {', '.join(task.classes)}")
    if not task.is_classification and task.classes:
        raise MinbertError(f"{where} classes has {len(task.classes)} names; a {task.kind} task has none")
    if not task.is_classification and not task.low < task.high:
        raise MinbertError(f"{where} the scale runs from {task.low} to {task.high}; expected low below high")
    _known(task.head, HEADS, f"{where} head")
    task = _with_loss(task, where)
    _check_head(task, HEADS[task.head], where)
    _check_numbers(task, where)
    if task.metric:
        _known(task.metric, METRIC_NAMES[task.is_classification], f"{where} metric")
    return task


def _with_loss(task: Task, where: str) -> Task:
    from dataclasses import replace

    usual = (
        "mse" if not task.is_classification else "bce" if task.is_pair and len(task.classes) == 2 else "cross-entropy"
    )
    if task.is_classification and HEADS[task.head].one_output:
        usual = "bce"
    task = replace(
        task,
        loss=task.loss or usual,
        scale=task.scale or (5.0 if task.is_classification else task.high),
        threshold=task.threshold or (task.low + task.high) / 2,
    )
    _known(task.loss, LOSSES, f"{where} loss")
    if task.kind not in LOSSES[task.loss]:
        raise MinbertError(f'{where} loss is "{task.loss}", which is not for {task.kind}; expected {_losses_for(task)}')
    if task.loss == "bce" and len(task.classes) != 2:
        raise MinbertError(f'{where} loss is "bce" with {len(task.classes)} classes; expected 2, or "cross-entropy"')
    return task


def _check_head(task: Task, row: HeadRow, where: str) -> None:
    if not task.is_pair and not row.single:
        single = ", ".join(name for name, head in HEADS.items() if head.single)
        raise MinbertError(
            f'{where} head is "{task.head}", which reads two texts; a {task.kind} task has one: {single}'
        )
    if row.one_output and task.outputs > 1:
        raise MinbertError(f'{where} head "{task.head}" gives one number; {task.loss} needs {task.outputs}')
    if row.never_negative and task.is_classification:
        raise MinbertError(f'{where} head "{task.head}" is never below 0, so its probability never below one half')
    if task.loss == "cosine-mse" and task.head not in COSINES:
        raise MinbertError(f'{where} loss "cosine-mse" needs a cosine head; found "{task.head}"')


def _check_numbers(task: Task, where: str) -> None:
    if not 0 < task.fraction <= 100:
        raise MinbertError(f"{where} fraction is {task.fraction}; expected more than 0 and at most 100")
    for key in ("weight", "hidden"):
        if getattr(task, key) < 0:
            raise MinbertError(f"{where} {key} is {getattr(task, key)}; expected 0 or more")
    if not 0 <= task.label_smoothing < 1:
        raise MinbertError(f"{where} label_smoothing is {task.label_smoothing}; expected 0 to less than 1")
    if task.label_smoothing and not task.is_classification:
        raise MinbertError(f"{where} label_smoothing is {task.label_smoothing}; a {task.kind} task has no classes")
    if task.class_weights and len(task.class_weights) != len(task.classes):
        raise MinbertError(f"{where} class_weights has {len(task.class_weights)} numbers; expected {len(task.classes)}")
    if task.class_weights and min(task.class_weights) < 0:
        raise MinbertError(f"{where} class_weights holds {min(task.class_weights)}; expected 0 or more")
    if task.scale <= 0 and (task.head in COSINES or task.loss == "cosent"):
        raise MinbertError(f"{where} scale is {task.scale}; expected more than 0")
    if task.loss == "bce-threshold" and not task.low < task.threshold < task.high:
        raise MinbertError(f"{where} threshold is {task.threshold}; expected it between {task.low} and {task.high}")


def _losses_for(task: Task) -> str:
    return ", ".join(name for name, kinds in LOSSES.items() if task.kind in kinds)


def _known(word: str, known: object, where: str) -> None:
    names = list(known)  # type: ignore[call-overload]
    if word not in names:
        raise MinbertError(f'{where} is "{word}"{suggest(word, names)}; expected one of: {", ".join(names)}')
