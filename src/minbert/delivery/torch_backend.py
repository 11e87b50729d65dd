"""The backend `torch`: a trained model, or a bare encoder, on any device. Only here does delivery import torch to answer.

backend, tokenizer, manifest = open_model(Path("runs/sample/model"), "torch", "fp32", "cpu")
TorchEncoder.on(encoder, "cuda", "bf16").encode(tokens, ["mean"])["mean"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minbert.delivery.backends import BackendName, Precision, Vectors, open_onnx
from minbert.errors import MinbertError
from minbert.machine import choose_device, choose_precision
from minbert.model.multitask import MultitaskModel, answer_pooled, encode_pooled, outputs_of
from minbert.model.runner import Runner, make_runner
from minbert.model.saved import load_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from minbert.data.inputs import Inputs
    from minbert.data.tokenizer import Tokenizer, Tokens
    from minbert.delivery.onnx_encoder import OnnxEncoder
    from minbert.model.encoder import Encoder, Pooling
    from minbert.model.manifest import Manifest


class TorchEncoder:
    """A runner of the torch encoder, on whatever device it is."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @classmethod
    def on(cls, encoder: Encoder, device: str, precision: Precision = "fp32") -> TorchEncoder:
        """The encoder moved to a device, not training, in a precision that the device has."""
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
        return encode_pooled(self.runner, tokens, poolings, progress=progress)


class TorchBackend:
    """A whole model.

    Args:
        model: the encoder and the heads.
        encoder: runs in ONNX Runtime in the place of the model's own encoder, from the same weights.
    """

    def __init__(self, model: MultitaskModel, encoder: OnnxEncoder | None = None) -> None:
        self.model, self.encoder = model.eval(), encoder

    def encode(
        self, tokens: Tokens, poolings: Iterable[Pooling], *, progress: Callable[[int], None] | None = None
    ) -> Vectors:
        if self.encoder is not None:
            return self.encoder.encode(tokens, poolings, progress=progress)
        return encode_pooled(self.model.runner, tokens, poolings, progress=progress)

    def answer(self, views: Mapping[str, Sequence[NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
        return {task: answer_pooled(self.model, task, parts) for task, parts in views.items()}

    def outputs_of(self, inputs: Inputs) -> NDArray[np.float32]:
        if inputs.masking is not None and self.encoder is not None:
            name = inputs.task.name
            raise MinbertError(f'the masked task "{name}" needs the tokens\' own vectors; expected precision fp32')
        return outputs_of(self.model, inputs, self.encode)

    def use_threads(self, threads: int) -> None:
        torch.set_num_threads(min(torch.get_num_threads(), threads))
        if self.encoder is not None:
            self.encoder.use_threads(threads)


def open_model(
    folder: Path, backend: BackendName, precision: Precision, device: str
) -> tuple[TorchBackend, Tokenizer, Manifest]:
    """A model folder. With backend "onnx" the encoder runs in ONNX Runtime, the heads in torch."""
    if backend == "onnx":
        model, tokenizer, manifest = load_model(folder)
        return TorchBackend(model, open_onnx(folder / "encoder", precision)), tokenizer, manifest
    model, tokenizer, manifest = load_model(folder, device=str(choose_device(device)))
    if precision != "fp32":
        model.use(torch_precision(precision, model.device))
    return TorchBackend(model), tokenizer, manifest


def torch_precision(precision: Precision, device: torch.device) -> str:
    """The same, if torch has it on that device; otherwise an error that says what it has."""
    if precision == "int8":
        raise MinbertError("precision is \"int8\", which is ONNX Runtime's; expected one of torch's")
    return choose_precision(precision, device)
