"""The two ways to run a model, behind one interface: torch, on any device, and ONNX Runtime, on the CPU.

    choose_backend("int8", None, "cpu")                # "onnx"
    encoder = open_onnx(folder, "int8")                # or TorchEncoder.on(encoder, "cuda", "bf16")
    encoder.encode(tokens, ["mean"])["mean"]           # (sequences, width), in the sequences' order

| backend | a bare encoder | a model with its heads |
|---|---|---|
| torch | `torch_backend.TorchEncoder` | `torch_backend.TorchBackend`, of a model folder |
| onnx | `onnx_encoder.OnnxEncoder` | `exported.OnnxModel`, of an export; no torch is imported for it |

A model folder in int8 is between them: the encoder in ONNX Runtime, the heads in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from minbert.delivery.onnx_encoder import OnnxEncoder
from minbert.delivery.onnx_encoder import Precision as OnnxPrecision
from minbert.errors import MinbertError

if TYPE_CHECKING:
    from minbert.data.inputs import Inputs
    from minbert.data.tokenizer import Tokens
    from minbert.model.encoder import Pooling

Vectors = dict["Pooling", NDArray[np.float32]]
"""Sentence vectors, (sequences, width), by pooling."""
Precision = Literal["fp32", "int8", "tf32", "bf16", "fp16"]
BackendName = Literal["torch", "onnx"]


class PooledEncoder(Protocol):
    """Token sequences to sentence vectors."""

    def encode(
        self, tokens: Tokens, poolings: Iterable[Pooling], *, progress: Callable[[int], None] | None = None
    ) -> Vectors:
        """Each sequence encoded once and pooled in every way asked for, (sequences, width), in the sequences' order."""


@runtime_checkable
class Backend(PooledEncoder, Protocol):
    """A whole model: `TorchBackend`, or `OnnxModel`, which needs no torch. To be used from several threads."""

    def answer(self, views: Mapping[str, Sequence[NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
        """Heads' outputs, (rows, outputs) by task, from the pooled vectors of the views that each reads."""

    def outputs_of(self, inputs: Inputs) -> NDArray[np.float32]:
        """A task's outputs for a whole split that is tokenized already; see `multitask.outputs_of`."""

    def use_threads(self, threads: int) -> None:
        """Use at most that many cores."""


def choose_backend(precision: str, backend: str | None, device: str) -> BackendName:
    """Which of the two a precision means where nothing was said, or why that cannot be: int8 is ONNX Runtime's, which
    runs on the CPU; the precisions of GPUs are torch's."""
    if precision not in get_args(Precision):
        raise MinbertError(f'precision is "{precision}"; expected one of: {", ".join(get_args(Precision))}')
    if backend not in (None, *get_args(BackendName)):
        raise MinbertError(f'backend is "{backend}"; expected one of: {", ".join(get_args(BackendName))}')
    chosen = backend or ("onnx" if precision == "int8" else "torch")
    if chosen == "onnx" and precision not in get_args(OnnxPrecision):
        raise MinbertError(f'precision is "{precision}", which ONNX Runtime has not; expected fp32 or int8')
    if chosen == "torch" and precision == "int8":
        raise MinbertError('precision is "int8" and backend "torch"; expected backend "onnx", or another precision')
    if chosen == "onnx" and device not in ("auto", "cpu"):
        what = 'precision is "int8"' if precision == "int8" else 'backend is "onnx"'
        raise MinbertError(f'{what}, which runs on the CPU, and device "{device}"; expected cpu')
    return cast("BackendName", chosen)


def open_onnx(folder: Path, precision: str) -> OnnxEncoder:
    """ONNX Runtime's encoder of a folder in Hugging Face layout."""
    return OnnxEncoder.of_folder(folder, precision=cast("OnnxPrecision", precision))
