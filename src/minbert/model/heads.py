"""Heads: the vectors of a row's views in, a few numbers out.

A head is a module `forward(*views) -> (rows, outputs)`. Those that a contrastive loss can train have a second method,
`vector(view) -> (rows, dim)`: what they compare. What it reads (one text, two texts, both as one input, in one
order or both) is said by its row of `tasks.HEADS`; here is how it computes. u and v are sentence vectors, (rows, width).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from minbert.model.encoder import ACTIVATIONS, EncoderConfig
from minbert.tasks import Task

Layer = Callable[[Tensor], Tensor]


class Compares(Protocol):
    """A head that a contrastive loss can train."""

    def vector(self, view: Tensor) -> Tensor: ...


def cosine(u: Tensor, v: Tensor) -> Tensor:
    """Of each row, (rows, 1). Both sides at once are half the launches of `F.cosine_similarity`, there and back."""
    one, other = F.normalize(torch.stack([u, v]), dim=-1, eps=1e-8).unbind()  # (rows, width) each
    return (one * other).sum(-1, keepdim=True)


class Linear(nn.Module):
    """Dropout, linear: over one vector, or over two side by side (`concat`)."""

    def __init__(self, task: Task, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width * len(task.views), task.outputs)

    def forward(self, *views: Tensor) -> Tensor:
        return self.out(self.dropout(torch.cat(views, dim=-1) if len(views) > 1 else views[0]))


class Perceptron(nn.Module):
    """A hidden layer with ReLU between."""

    def __init__(self, task: Task, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(width, task.hidden or width)
        self.out = nn.Linear(task.hidden or width, task.outputs)

    def forward(self, view: Tensor) -> Tensor:
        return self.out(self.dropout(F.relu(self.hidden(self.dropout(view)))))


class Difference(nn.Module):
    """u - v, dropout, linear. A logit is then f(u) - f(v): it says which is more, not how alike they are."""

    def __init__(self, task: Task, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, task.outputs)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.out(self.dropout(u - v))


class AbsoluteDifference(Difference):
    """|u - v|, dropout, linear."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.out(self.dropout((u - v).abs()))


class Interaction(nn.Module):
    """[|u - v|, u * v], dropout, back to the width, ReLU, linear (Hillebrand's "concatenation mode")."""

    def __init__(self, task: Task, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(2 * width, task.hidden or width)
        self.out = nn.Linear(task.hidden or width, task.outputs)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        both = torch.cat([(u - v).abs(), u * v], dim=-1)  # (rows, 2 * width)
        return self.out(F.relu(self.hidden(self.dropout(both))))


class Cosine(nn.Module):
    """Dropout, cos(u, v) times the scale. Nothing to learn here: the encoder must bring the vectors together."""

    def __init__(self, task: Task, width: int, dropout: float) -> None:  # noqa: ARG002 - the signature of every head
        super().__init__()
        self.scale = task.scale
        self.dropout = nn.Dropout(dropout)

    def vector(self, view: Tensor) -> Tensor:
        """As it is: a contrastive loss has enough noise from the encoder's dropout."""
        return view

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.scale * cosine(self.dropout(u), self.dropout(v))


class SimCse(nn.Module):
    """The cosine of the vectors; while training, of what a linear layer + tanh makes of them.

    That layer is left away at evaluation, as SimCSE does for its unsupervised model (Gao et al. 2021, arXiv:2104.08821;
    their supervised one keeps it).
    """

    def __init__(self, task: Task, width: int, dropout: float) -> None:  # noqa: ARG002 - the encoder's dropout is enough
        super().__init__()
        self.scale = task.scale
        self.layer = nn.Linear(width, width)

    def vector(self, view: Tensor) -> Tensor:
        return torch.tanh(self.layer(view)) if self.training else view

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.scale * cosine(self.vector(u), self.vector(v))


class ProjectedDot(nn.Module):
    """Both vectors through one layer to `hidden` dimensions, then their dot product (Gulluk's DPS)."""

    def __init__(self, task: Task, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Linear(width, task.hidden or width)

    def vector(self, view: Tensor) -> Tensor:
        return self.projection(self.dropout(view))  # (rows, hidden)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        u, v = self.vector(u), self.vector(v)
        return (u * v).sum(-1, keepdim=True)


class ProjectedCosine(nn.Module):
    """ReLU of the projections' cosine, times the scale (Gulluk's DPS-MSE)."""

    def __init__(self, task: Task, width: int, dropout: float) -> None:
        super().__init__()
        self.scale = task.scale
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Linear(width, task.hidden or width)

    def vector(self, view: Tensor) -> Tensor:
        return self.projection(self.dropout(view))  # (rows, hidden)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        u, v = self.vector(u), self.vector(v)
        return self.scale * F.relu(cosine(u, v))


class CosineOfOne(nn.Module):
    """Cosine after a layer to one number: it can only be -1 or 1 (Vinjapuri & Vasireddy's third experiment)."""

    def __init__(self, task: Task, width: int, dropout: float) -> None:
        super().__init__()
        self.scale = task.scale
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Linear(width, 1)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        u, v = self.projection(self.dropout(u)), self.projection(self.dropout(v))  # (rows, 1)
        return self.scale * cosine(u, v)


class BothOrders(nn.Module):
    """Mohammed & Sabane's heads over the pair read in both orders: dropout and a linear layer for each branch, and a last
    one over their logits. PH has the two orders, DPH adds their difference, DPHA a tanh before the last layer.
    """

    def __init__(
        self, task: Task, width: int, dropout: float, *, difference: bool = False, activation: bool = False
    ) -> None:
        super().__init__()
        branches = 3 if difference else 2
        self.difference, self.activation = difference, activation
        self.dropout = nn.Dropout(dropout)
        self.branches = nn.ModuleList(nn.Linear(width, task.outputs) for _ in range(branches))
        self.out = nn.Linear(branches * task.outputs, task.outputs)

    def initialise(self, generator: torch.Generator | None) -> None:
        """The last layer's weights as torch draws them. It reads two or three numbers: as small as BERT's weights, it would
        pass on a fiftieth of the others' gradient, and the encoder would hardly hear of the task. Its bias begins at 0, as
        every other does: a drawn one can put the labels out of what tanhs reach, and they then never learn."""
        reach = self.out.in_features**-0.5
        nn.init.uniform_(self.out.weight, -reach, reach, generator=generator)

    def forward(self, joint: Tensor, other: Tensor, first: Layer = lambda view: view) -> Tensor:
        """`first`: a layer that each branch begins with, after the dropout."""
        # The difference has a dropout of its own: the two orders are so alike that of two dropouts it would be the noise
        views = [joint, other, joint - other] if self.difference else [joint, other]
        logits = torch.cat(
            [branch(first(self.dropout(view))) for branch, view in zip(self.branches, views, strict=True)], dim=-1
        )  # (rows, branches * outputs)
        return self.out(torch.tanh(logits) if self.activation else logits)


class Vocabulary(nn.Module):
    """What a masked token was: linear, activation, LayerNorm, then the token table's own weights and a bias.

    The table is the encoder's, handed in at each call, so that its gradient has both parts and no copy is saved.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, table: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Hidden states of the tokens to guess, (tokens, width), to a logit for each word, (tokens, vocabulary).

        Args:
            dtype: of the product with the table, which is as large as some layers of the encoder.
        """
        wanted = self.norm(ACTIVATIONS[self.activation](self.transform(hidden)))
        return F.linear(wanted.to(dtype), table.to(dtype)).float() + self.bias


BUILDERS: dict[str, Callable[[Task, int, float], nn.Module]] = {
    "linear": Linear,
    "mlp": Perceptron,
    "concat": Linear,
    "difference": Difference,
    "absolute-difference": AbsoluteDifference,
    "interaction": Interaction,
    "cosine": Cosine,
    "projected-dot": ProjectedDot,
    "projected-cosine": ProjectedCosine,
    "simcse": SimCse,
    "cosine-1d": CosineOfOne,
    "ph": BothOrders,
    "dph": lambda task, width, dropout: BothOrders(task, width, dropout, difference=True),
    "dpha": lambda task, width, dropout: BothOrders(task, width, dropout, difference=True, activation=True),
}


def build_head(task: Task, width: int, dropout: float) -> nn.Module:
    """`dropout` is the model's; a task may have its own."""
    return BUILDERS[task.head](task, width, dropout if task.dropout is None else task.dropout)
