"""An exported model in the place of a trained one, so that a `Predictor` runs model.onnx: encoder and heads alike."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from minbert.data.tokenizer import Tokenizer
from minbert.delivery.exported import MANIFEST, MODEL, OnnxModel, read_export
from minbert.errors import MinbertError, shown
from minbert.model.encoder import Pooling
from minbert.model.saved import Manifest, from_plain
from minbert.tasks import Task


class ExportedModel:
    """What a predictor asks of a `MultitaskModel`, answered by ONNX Runtime."""

    def __init__(self, onnx: OnnxModel, manifest: Manifest) -> None:
        self.onnx = onnx
        self.tasks: dict[str, Task] = {task.name: task for task in manifest.tasks}
        self.poolings: dict[str, Pooling] = {
            name: "tokens" if task.is_masked else task.pooling or manifest.model.pooling
            for name, task in self.tasks.items()
        }
        self.device = torch.device("cpu")

    def eval(self) -> ExportedModel:
        return self

    def answer(self, task: str, *views: Tensor) -> Tensor:
        """A head's outputs from the pooled vectors of its views."""
        return torch.from_numpy(self.onnx.answer(task, [view.numpy() for view in views]))

    def vectors(self, task: str, *views: Tensor) -> Tensor:  # noqa: ARG002 - the signature of MultitaskModel
        raise MinbertError(f"an export of {task} gives answers, not the vectors that it compares; expected the model")


def open_export(
    folder: Path, *, device: str, precision: str, backend: str | None
) -> tuple[ExportedModel, Tokenizer, Manifest]:
    """An export's folder; it runs in ONNX Runtime, on the CPU, in the precision that it was written in."""
    raw = read_export(folder)
    where = shown(folder)
    if backend == "torch" or device not in ("cpu", "auto"):
        found = f'device "{device}"' if backend != "torch" else 'backend "torch"'
        raise MinbertError(f"{where}: an export, which runs in ONNX Runtime on the CPU, and {found}; expected cpu")
    if precision not in ("fp32", raw["precision"]):
        raise MinbertError(f'{where}: an export in {raw["precision"]}, and precision "{precision}"')
    manifest = from_plain(raw["model"], folder / MANIFEST)
    return ExportedModel(OnnxModel(folder / MODEL, raw), manifest), Tokenizer.load(folder), manifest
