"""Does what a task asks for go together? A recipe that asks for nonsense is refused when it is read, and not after an
hour of training.

    task = check_task(Task("mine", "pair-regression", text2="other"))      # with the usual loss, scale and threshold
"""

from __future__ import annotations

from dataclasses import replace

from minbert.errors import MinbertError, suggest
from minbert.tasks import CONTRASTIVE, COSINES, HEADS, LOSSES, HeadRow, Task, metric_names


def check_task(task: Task) -> Task:
    """The task with its defaults filled in, or an error that says what does not go together."""
    where = f"[tasks.{task.name}]"
    if not task.name.strip() or not task.name.isprintable() or set(task.name) & set("/\\.*"):  # it names files
        raise MinbertError(f'a task is named "{task.name}"; expected a name without / \\ . and *')
    if task.is_pair and not task.text2:
        raise MinbertError(f"{where} text2 is empty; a {task.kind} task reads two columns")
    if task.text3 and not (task.is_contrastive and task.text2):
        only = "a contrastive task with text2 has a third" if task.is_contrastive else "only a contrastive task has one"
        raise MinbertError(f'{where} text3 is "{task.text3}"; {only}')
    if not task.is_pair and task.text2:
        raise MinbertError(f'{where} text2 is "{task.text2}"; a {task.kind} task reads one column')
    if task.is_classification and len(task.classes) < 2:
        raise MinbertError(f"{where} classes has {len(task.classes)} names; expected two or more")
    if len(set(task.classes)) != len(task.classes):
        raise MinbertError(f"{where} classes names one twice: {', '.join(task.classes)}")
    if task.classes and not task.is_classification and (task.has_label or not task.only):
        raise MinbertError(f"{where} classes has {len(task.classes)} names; a {task.kind} task has none")
    if not task.bounded and (task.is_classification or not task.has_label):
        raise MinbertError(f"{where} bounded is false; a {task.kind} task has no scale")
    if not task.is_classification and not task.low < task.high:
        raise MinbertError(f"{where} the scale runs from {task.low} to {task.high}; expected low below high")
    _known(task.head, HEADS, f"{where} head")
    task = _check_masked(task, where)
    task = _with_loss(task, where)
    _check_head(task, HEADS[task.head], where)
    _check_numbers(task, where)
    _check_rows(task, where)
    if task.metric:
        _known(task.metric, metric_names(task), f"{where} metric")
    return task


def _check_masked(task: Task, where: str) -> Task:
    """Only a masked task hides tokens; it guesses them with a layer of its own, and no column is its label."""
    if not task.is_masked:
        for key in ("mask_rate", "whole_words"):
            if getattr(task, key) != getattr(Task, key):
                raise MinbertError(f"{where} {key} is {getattr(task, key)}; a {task.kind} task hides no tokens")
        return task
    if task.label not in ("", Task.label):
        raise MinbertError(f'{where} label is "{task.label}"; a masked task has none')
    if task.head != Task.head:
        raise MinbertError(f'{where} head is "{task.head}"; a masked task has its own: the token table')
    if task.pooling is not None:
        raise MinbertError(f'{where} pooling is "{task.pooling}"; a masked task reads the tokens themselves')
    if not 0 < task.mask_rate <= 1:
        raise MinbertError(f"{where} mask_rate is {task.mask_rate}; expected more than 0 and at most 1")
    return replace(task, label="")


def _with_loss(task: Task, where: str) -> Task:
    loss = task.loss or _usual_loss(task)
    task = replace(
        task,
        loss=loss,
        scale=task.scale or (5.0 if task.is_classification else 1.0 if task.is_contrastive else task.high),
        temperature=task.temperature or CONTRASTIVE.get(loss, 0.0),
        threshold=task.threshold or (task.low + task.high) / 2,
    )
    _known(task.loss, LOSSES, f"{where} loss")
    if task.kind not in LOSSES[task.loss]:
        raise MinbertError(f'{where} loss is "{task.loss}", which is not for {task.kind}; expected {_losses_for(task)}')
    if task.loss == "bce" and len(task.classes) != 2:
        raise MinbertError(f'{where} loss is "bce" with {len(task.classes)} classes; expected 2, or "cross-entropy"')
    if task.loss in CONTRASTIVE and task.is_classification and len(task.classes) != 2:
        found = f'loss is "{task.loss}" with {len(task.classes)} classes'
        raise MinbertError(f"{where} {found}; expected 2, the second of which says that a pair belongs together")
    return task


def _usual_loss(task: Task) -> str:
    if task.is_masked:
        return "masked-lm"
    if task.is_contrastive:
        return "simcse"
    if not task.is_classification:
        return "mse"
    one_number = HEADS[task.head].one_output or (task.is_pair and len(task.classes) == 2)
    return "bce" if one_number else "cross-entropy"


def _check_head(task: Task, row: HeadRow, where: str) -> None:
    contrastive = task.loss in CONTRASTIVE
    if (contrastive and not row.compares) or (row.only_contrastive and not contrastive):
        heads = [name for name, head in HEADS.items() if head.compares]
        expected = f"a head that gives vectors to compare: {', '.join(heads)}"
        if not contrastive:
            expected = f"a contrastive loss: {', '.join(CONTRASTIVE)}"
        raise MinbertError(f'{where} head is "{task.head}" and loss "{task.loss}"; expected {expected}')
    if not task.answers_pairs and not row.single:
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
    if task.dropout is not None and not 0 <= task.dropout < 1:
        raise MinbertError(f"{where} dropout is {task.dropout}; expected 0 to less than 1")
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
    if task.loss in CONTRASTIVE and (task.label_smoothing or task.class_weights):
        raise MinbertError(f'{where} loss "{task.loss}" has no use for label_smoothing and class_weights')
    if task.distinct_batches and task.loss not in CONTRASTIVE:
        expected = f"it with a contrastive loss: {', '.join(CONTRASTIVE)}"
        raise MinbertError(f'{where} distinct_batches with loss "{task.loss}"; expected {expected}')
    if not task.bounded and (task.has_sigmoid or task.loss == "cosent" or task.loss in CONTRASTIVE):
        kind = "is within the scale by itself" if task.has_sigmoid else "has no scale"
        raise MinbertError(
            f'{where} bounded is false with loss "{task.loss}", whose score {kind}; expected it left out'
        )
    if task.temperature < 0 or (task.temperature and task.loss not in CONTRASTIVE):
        expected = "more than 0" if task.temperature < 0 else f"it with a contrastive loss: {', '.join(CONTRASTIVE)}"
        raise MinbertError(f'{where} temperature is {task.temperature} with loss "{task.loss}"; expected {expected}')
    by_score = task.loss == "bce-threshold" or (task.loss in CONTRASTIVE and task.kind == "pair-regression")
    if by_score and not task.low < task.threshold < task.high:
        raise MinbertError(f"{where} threshold is {task.threshold}; expected it between {task.low} and {task.high}")


def _check_rows(task: Task, where: str) -> None:
    """Which rows are trained on."""
    if task.only:
        check_class(task, task.only, f"{where} only")
    if not 0 <= task.negatives <= 100:
        raise MinbertError(f"{where} negatives is {task.negatives}; expected 0 to 100")
    if task.negatives and not (task.is_pair and task.has_label):
        raise MinbertError(
            f"{where} negatives is {task.negatives}; a {task.kind} task has no labelled pairs to take apart"
        )
    if task.negative_kind == "mined" and not task.negatives:
        raise MinbertError(f'{where} negative_kind is "mined" with negatives 0; expected negatives above 0')
    if (borrow := task.borrow) is None:
        return
    if task.kind != "pair-regression":
        raise MinbertError(f"{where} borrow gives rows a score; a {task.kind} task has none, expected pair-regression")
    if borrow.task == task.name:
        raise MinbertError(f'{where} borrow.task is "{borrow.task}", the task itself; expected another')
    if not task.low <= borrow.low <= borrow.high <= task.high:
        scale = f"the scale {task.low:g} to {task.high:g}"
        raise MinbertError(f"{where} borrow runs from {borrow.low:g} to {borrow.high:g}; expected a part of {scale}")
    if not 0 < borrow.fraction <= 1:
        raise MinbertError(f"{where} borrow.fraction is {borrow.fraction}; expected more than 0 and at most 1")


def check_class(task: Task, name: str, where: str) -> None:
    """Is it one of the task's classes: a name, or a number from 0 where the names are no numbers themselves?"""
    if not task.classes:
        raise MinbertError(f'{where} is "{name}"; the {task.kind} task {task.name} has no classes')
    numbers = () if any(map(_is_number, task.classes)) else map(str, range(len(task.classes)))
    if name not in (*task.classes, *numbers):
        known = ", ".join(task.classes)
        raise MinbertError(f'{where} is "{name}"{suggest(name, task.classes)}; expected one of: {known}')


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _losses_for(task: Task) -> str:
    return ", ".join(name for name, kinds in LOSSES.items() if task.kind in kinds)


def _known(word: str, known: object, where: str) -> None:
    names = list(known)  # type: ignore[call-overload]
    if word not in names:
        raise MinbertError(f'{where} is "{word}"{suggest(word, names)}; expected one of: {", ".join(names)}')
