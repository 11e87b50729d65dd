"""The seam where the tasks' losses become one gradient.

A rule takes the weighted losses of a step, by task, and leaves its result in the parameters' `.grad`, added to what is
there (so that gradients can accumulate over several batches). Gradient surgery and its kin are further rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

GradientRule = Callable[[Mapping[str, Tensor]], None]


def add_gradients(losses: Mapping[str, Tensor]) -> None:
    """The gradient of the sum: one backward pass."""
    total = torch.stack(list(losses.values())).sum()
    if total.requires_grad:  # not so where nothing learns: a cosine head on a frozen encoder
        total.backward()  # type: ignore[no-untyped-call]
