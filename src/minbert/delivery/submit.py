"""The course's six prediction files, in its exact format: `minbert submit MODEL`.

The header's fields are separated by a tab and each row's by " , "; lines end with a space; similarity is spelt as the
course spells it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from minbert.atomic import write_text
from minbert.data.raw import Split, read_split
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError
from minbert.tasks import BUILT_IN, Task

# Our task -> the course's file name and column.
FILES = {
    "sst": ("sst", "Predicted_Sentiment"),
    "quora": ("para", "Predicted_Is_Paraphrase"),
    "sts": ("sts", "Predicted_Similiary"),
}


@dataclass(frozen=True)
class Submitted:
    """One of the six: where it was written, or why not."""

    path: Path
    rows: int = 0
    missing: str = ""
    skipped: int = 0


def submit(predictor: Predictor, data: Path, out: Path = Path("predictions")) -> Iterator[Submitted]:
    """Write predictions/{sst,para,sts}-{dev,test}-output.csv for the tasks that the model has."""
    known = [name for name in FILES if name in predictor.tasks and not predictor.tasks[name].is_masked]
    if not known:
        raise MinbertError(f"this model has none of {', '.join(FILES)}; it has: {', '.join(predictor.tasks)}")
    out.mkdir(parents=True, exist_ok=True)
    for name in known:
        short, column = FILES[name]
        for split in ("dev", "test"):
            path = out / f"{short}-{split}-output.csv"
            yield _submit(predictor, predictor.tasks[name], split, data, path, column)


def _submit(predictor: Predictor, task: Task, split: Split, data: Path, path: Path, column: str) -> Submitted:
    source = task if getattr(task, split) else replace(BUILT_IN[task.name], normalise=task.normalise)
    try:
        examples = read_split(source, split, data)
    except MinbertError as error:
        if not str(error).startswith("no file"):
            raise
        return Submitted(path, missing=str(error))
    answers = predictor.answers(examples.texts, examples.pairs, [task.name])[task.name]
    # As the course prints them: sentiment as a whole number, the others as floats.
    values = [str(int(value)) if task.name == "sst" else str(float(value)) for value in answers.predictions]
    rows = "".join(f"{name} , {value} \n" for name, value in zip(examples.ids, values, strict=True))
    write_text(path, f"id \t {column} \n{rows}")
    return Submitted(path, len(examples), skipped=sum(examples.skipped.values()))
