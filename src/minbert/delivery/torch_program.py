"""A whole model as one torch.export program: `torch.export.load("model.pt2").module()` runs it without minbert.

Inputs and outputs are those of the ONNX file (`onnx_heads`), without `known`: input_ids, attention_mask, token_type_ids and
pairs in, a dictionary of `embedding` and one entry for each task out. Batch, length and pairs may be of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim

from minbert.delivery.onnx_names import EMBEDDING, output_name
from minbert.errors import MinbertError
from minbert.model.encoder import POOLINGS, Pooling, pool
from minbert.model.multitask import MultitaskModel


class Program(nn.Module):
    """A padded batch to every output."""

    def __init__(self, model: MultitaskModel, pooling: Pooling) -> None:
        super().__init__()
        self.model, self.pooling = model, pooling
        self.tasks = [task for task in model.tasks.values() if not task.is_masked]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, pairs: Tensor
    ) -> dict[str, Tensor]:
        mask = attention_mask.bool()
        hidden = self.model.encoder(input_ids, mask, token_type_ids)
        hows = dict.fromkeys([self.pooling, *(self.model.poolings[task.name] for task in self.tasks)])
        pooled = {how: pool(hidden, mask, how, self.model.encoder.pooler) for how in hows}
        outputs = {EMBEDDING if how == self.pooling else f"{EMBEDDING}_{how}": pooled[how] for how in hows}
        for task in self.tasks:
            vectors = pooled[self.model.poolings[task.name]]
            both = len(task.answer_views) == 2
            views = (vectors[pairs[:, 0]], vectors[pairs[:, 1]]) if both else (vectors,)
            outputs[output_name(task)] = self.model.answer(task.name, *views)
        return outputs


def write_program(model: MultitaskModel, pooling: Pooling, path: Path) -> None:
    """The model, on the CPU and in eval mode, as a file."""
    program = Program(model, pooling).eval()
    for how in (pooling, *(model.poolings[task.name] for task in program.tasks)):
        if how not in POOLINGS:
            raise MinbertError(
                f'pooling is "{how}", which reads more than the tokens; for torch.export expected {", ".join(POOLINGS)}'
            )
    ids = torch.full((3, 7), model.encoder.config.pad_id)
    example = ids, torch.ones_like(ids), torch.zeros_like(ids), torch.tensor([[0, 1], [1, 2]])
    batch = {0: Dim("sequences", min=1), 1: Dim("tokens", min=1, max=model.encoder.config.max_tokens)}
    with torch.no_grad():
        exported = torch.export.export(program, example, dynamic_shapes=(batch, batch, batch, {0: Dim("pairs")}))
    torch.export.save(exported, path)


def run_program(path: Path) -> Callable[[Sequence[Any], NDArray[np.int64] | None], dict[str, NDArray[np.float32]]]:
    """The file, read back: a padded batch of the tokenizers library, and pairs, to every output."""
    module = torch.export.load(path).module()

    @torch.inference_mode()
    def run(encodings: Sequence[Any], pairs: NDArray[np.int64] | None) -> dict[str, NDArray[np.float32]]:
        columns = [[getattr(row, name) for row in encodings] for name in ("ids", "attention_mask", "type_ids")]
        which = torch.zeros((0, 2), dtype=torch.long) if pairs is None else torch.from_numpy(pairs)
        return {name: value.numpy() for name, value in module(*map(torch.tensor, columns), which).items()}

    return run
