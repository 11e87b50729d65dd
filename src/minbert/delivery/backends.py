"""The two ways to run an encoder, behind one method: torch, on any device, and ONNX Runtime, on the CPU.

    choose_backend("int8", None, "cpu")                # "onnx"
    encoder = open_onnx(folder, "int8")                # or TorchEncoder.on(encoder, "cuda", "bf16")
    encoder.encode(tokens, ["mean"])["mean"]           # (sequences, width), in the sequences' order

No torch is imported where none is needed: the second start in int8 reads one file and is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast, get_args

from minbert.delivery.onnx_encoder import OnnxEncoder
from minbert.delivery.onnx_encoder import Precision as OnnxPrecision
from minbert.errors import MinbertError
from minbert.machine import choose_precision

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from minbert.data.tokenizer import Tokens
    from minbert.model.encoder import Encoder, Pooling
    from minbert.model.runner import Runner

    Vectors = dict[Pooling, NDArray[np.float32]]

Precision = Literal["fp32", "int8", "tf32", "bf16", "fp16"]
BackendName = Literal["torch", "onnx"]


class PooledEncoder(Protocol):
    """Token sequences to sentence vectors."""

    def encode(
        self, tokens: Tokens, poolings: Iterable[Pooling], *, progress: Callable[[int], None] | None = None
    ) -> Vectors:
        """Each sequence encoded once and pooled in every way asked for, (sequences, width), in the sequences' order."""


class TorchEncoder:
    """A runner of the torch encoder, on whatever device it is."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @classmethod
    def on(cls, encoder: Encoder, device: str, precision: Precision = "fp32") -> TorchEncoder:
        """The encoder moved to a device, not training, in a precision that the device has."""
        import torch

        from minbert.model.runner import make_runner

        try:
            where = torch.device(device)
            encoder = encoder.to(where).eval()
        except (AssertionError, RuntimeError) as error:  # torch knows no such device, or this machine has none
            reason = str(error).splitlines()[0]
            raise MinbertError(f'device is "{device}" ({reason}); expected one that is here, such as cpu') from None
        return cls(make_runner(encoder, torch_precision(precision, where)))

    def encode(
        self, tokens: Tokens, poolings: Iterable[Pooling], *, progress: Callable[[int], None] | None = None
    ) -> Vectors:
        from minbert.model.multitask import encode_pooled

        return encode_pooled(self.runner, tokens, poolings, progress=progress)


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


def torch_precision(precision: Precision, device: torch.device) -> str:
    """The same, if torch has it on that device; otherwise an error that says what it has."""
    if precision == "int8":
        raise MinbertError("precision is \"int8\", which is ONNX Runtime's; expected one of torch's")
    return choose_precision(precision, device)


def open_onnx(folder: Path, precision: str) -> OnnxEncoder:
    """ONNX Runtime's encoder of a folder in Hugging Face layout."""
    return OnnxEncoder.of_folder(folder, precision=cast("OnnxPrecision", precision))
