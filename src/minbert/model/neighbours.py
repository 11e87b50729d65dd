"""The nearest texts by an encoder's mean vectors, exactly: every query against every text of the pool, block by block.

    nearest = Neighbours(model, tokenizer, max_tokens=256)
    index, cosines = nearest(queries, pool, 64)          # (queries, 64) both, the nearest first

Memory is that of the vectors and of one block of cosines, whatever the number of texts: 127,000 x 127,000 would be 60 GB.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F  # noqa: N812

from minbert.data.tokenizer import Tokenizer
from minbert.model.multitask import MultitaskModel, encode_pooled
from minbert.model.runner import make_runner

BLOCK = 1 << 25  # cosines at a time: 128 MiB


class Neighbours:
    """Finds texts near to others, with a model's encoder as it is when it is called."""

    def __init__(self, model: MultitaskModel, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_tokens = min(max_tokens, tokenizer.positions)

    def __call__(
        self, queries: Sequence[str], pool: Sequence[str], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """For each query its nearest in the pool, the nearest first, and their cosines: (queries, count) both."""
        texts = {text: place for place, text in enumerate(dict.fromkeys([*queries, *pool]))}
        vectors = self._encode(list(texts))
        found = nearest_rows(
            vectors[[texts[text] for text in queries]], vectors[[texts[text] for text in pool]], min(count, len(pool))
        )
        index, cosines = (part.cpu().numpy() for part in found)
        return index, cosines

    def _encode(self, texts: Sequence[str]) -> torch.Tensor:
        """(texts, width), of length 1, on the model's device."""
        tokens = self.tokenizer.encode(texts, max_tokens=self.max_tokens)
        training = self.model.training
        self.model.eval()
        try:
            runner = make_runner(self.model.encoder, "fp32")
            vectors = encode_pooled(runner, tokens, ["mean"])["mean"]
        finally:
            self.model.train(training)
        return F.normalize(torch.from_numpy(vectors).to(self.model.device), dim=-1)


@torch.inference_mode()
def nearest_rows(queries: torch.Tensor, pool: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the pool with the largest dot products, (queries, count), and these products."""
    size = max(1, BLOCK // max(1, len(pool)))
    found = [torch.topk(block @ pool.T, count, dim=1) for block in torch.split(queries, size)]
    return torch.cat([part.indices for part in found]), torch.cat([part.values for part in found])
