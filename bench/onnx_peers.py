"""How others run an encoder in int8: the plain export, quantized by ONNX Runtime's own tool, with and without
sentence-transformers around it.

sentence-transformers' ONNX backend needs optimum, whose newest release needs transformers below 4.58; beside the
transformers of constraints.txt it cannot be installed. So what it does is done here: the same export (torch's tracer),
the same settings of the same quantization tool (its `avx2`: unsigned weights, one scale per channel), and the session in
the place of the model inside an unchanged SentenceTransformer, which sorts, batches, tokenizes and pools. Beside the real
backend, in an environment of its own, it was no slower (docs/lab-log.md).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor, nn
from transformers import AutoModel
from transformers.modeling_outputs import BaseModelOutput

from minbert.data.batches import pad, plan_batches
from minbert.data.tokenizer import Tokenizer

NAMES = ("input_ids", "attention_mask", "token_type_ids")
Encode = Callable[[list[str]], NDArray[np.float32]]


class Hidden(nn.Module):
    """The hidden states alone, of named inputs, as an exporter wants them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(**dict(zip(NAMES, inputs, strict=True))).last_hidden_state


def export(folder: Path, path: Path) -> Path:
    """transformers' model as torch's own exporter writes it, batch and length left open."""
    model = Hidden(AutoModel.from_pretrained(folder, attn_implementation="eager").eval())
    ids = torch.ones((2, 7), dtype=torch.long)
    axes = {name: {0: "batch", 1: "tokens"} for name in (*NAMES, "hidden")}
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            model,
            (ids, ids, 0 * ids),
            path,
            input_names=list(NAMES),
            output_names=["hidden"],
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )
    return path


def quantize(exported: Path, path: Path, weights: QuantType) -> Path:
    """ONNX Runtime's own tool: weights in 8 bits, one scale per channel, activations as they come."""
    logging.disable(logging.WARNING)
    symmetric = {"WeightSymmetric": True, "ActivationSymmetric": False}
    quantize_dynamic(exported, path, per_channel=True, weight_type=weights, extra_options=symmetric)
    return path


def open_session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def plain_session(path: Path, tokenizer: Tokenizer, threads: int, rows: int = 32) -> Encode:
    """A session as anyone would write it down: sorted by length, batches of `rows`, the mean in numpy."""
    session = open_session(path, threads)

    def encode(texts: list[str]) -> NDArray[np.float32]:
        tokens = tokenizer.encode(texts)
        found: list[NDArray[np.float32]] = []
        plan = plan_batches(tokens.lengths, rows=rows)
        for batch in (pad(tokens, chosen, tokenizer.pad_id) for chosen in plan):
            inputs = batch.ids, batch.mask.astype(np.int64), batch.segments
            hidden = session.run(None, dict(zip(NAMES, inputs, strict=True)))[0]  # (rows, tokens, width)
            real = batch.mask[..., None]
            found.append((hidden * real).sum(1) / real.sum(1))
        vectors = np.concatenate(found)
        vectors[np.concatenate(plan)] = vectors.copy()
        return vectors

    return encode


class SessionInside(nn.Module):
    """A session that SentenceTransformer takes for its model."""

    def __init__(self, model: Any, path: Path, threads: int) -> None:
        super().__init__()
        self.config, self.session = model.config, open_session(path, threads)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, **_: Any) -> BaseModelOutput:
        inputs = [tensor.numpy() for tensor in (input_ids, attention_mask, token_type_ids)]
        hidden = self.session.run(None, dict(zip(NAMES, inputs, strict=True)))[0]
        return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden))
