"""What a run measures, as JSON lines, always; and to TensorBoard and Weights & Biases where they are installed."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from minbert.atomic import write_text


class MetricsLog:
    """Appends records to metrics.jsonl. A resumed run first drops what came after its checkpoint."""

    def __init__(self, folder: Path, *, name: str, resume_at: int | None = None, scored: bool = True) -> None:
        """`scored`: the checkpoint was made after the evaluation of its step, if there was one."""
        self.path = folder / "metrics.jsonl"
        if resume_at is None:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["step"] <= resume_at]
            if not scored:
                kept = [line for line in kept if line["step"] < resume_at or line["kind"] != "evaluation"]
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder, resume_at)
        self._wandb = _wandb(folder, name)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_valid(record), allow_nan=False) + "\n")
        self._file.flush()
        numbers = _numbers(record)
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=record["step"])

    def sync(self) -> None:
        """Onto the disk, before a checkpoint that counts on it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # the disk is full: `write` said so
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that a crash cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested tables of numbers as flat names: dev/sst/accuracy."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
            flat[f"{prefix}{key}"] = value
    return flat


def _valid(value: Any) -> Any:
    """JSON has no NaN, which a correlation with a constant is."""
    if isinstance(value, Mapping):
        return {key: _valid(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(folder: Path, resume_at: int | None) -> Any:
    purge = None if resume_at is None else resume_at + 1
    try:
        board = importlib.import_module("torch.utils.tensorboard")
        return board.SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
    except ImportError:
        return None


def _wandb(folder: Path, name: str) -> Any:
    """Only where its variables are set: an installed W&B alone must not send anything anywhere."""
    if not (os.environ.get("WANDB_PROJECT") or os.environ.get("WANDB_MODE")):
        return None
    try:
        return importlib.import_module("wandb").init(
            dir=str(folder), name=name, id=folder.resolve().name, resume="allow"
        )
    except ImportError:
        return None
