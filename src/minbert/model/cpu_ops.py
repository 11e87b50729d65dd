"""What makes training on a CPU faster: dropout from few random numbers, layers with their ways back written out, and
a table whose gradient keeps its memory.

    x = dropout(x, 0.1, training=True)
    x = train_layer(layer, x, batch.runs, bias)        # as the layer itself, in training mode

Matrix products are four fifths of a step and run at the processor's rate, so this is about the rest. torch draws a
random number for each element, one after the other; here four elements share one. Its attention with dropout is made of
a dozen passes over the scores, and here of five; scores, residual sums and gradients are worked on where they lie; and
what goes round a sublayer is added by the product on the way back.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from minbert.model.encoder import Layer
    from minbert.model.packed import Runs

aten = torch.ops.aten
STEPS = 2**16  # a rate is rounded to so many

# An activation and its way back: (gradient of what came out, what went in) to the gradient of what went in, which is
# written over the first.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (F.gelu, lambda grad, x: aten.gelu_backward.grad_input(grad, x, grad_input=grad)),
    "gelu_new": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=grad),
    ),
    "relu": (F.relu, lambda grad, x: aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad)),
    "silu": (F.silu, lambda grad, x: aten.silu_backward.grad_input(grad, x, grad_input=grad)),
}
ACTIVATIONS["gelu_pytorch_tanh"] = ACTIVATIONS["gelu_new"]


def keep_mask(shape: Sequence[int], rate: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """What to multiply with to drop elements at this rate: 0, or as much more than 1 as makes up for those.

    Each element has 16 bits of its own of what torch's generator draws; the factor is that of the rounded rate.
    """
    dropped = round(rate * STEPS)
    if dropped >= STEPS:
        return torch.zeros(shape, dtype=dtype)
    count = math.prod(shape)
    drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = drawn.view(torch.int16)[:count].ge_(dropped - STEPS // 2)  # 0 or 1: the same type on both sides is fast
    return kept.view(torch.Size(shape)).to(dtype).mul_(STEPS / (STEPS - dropped))


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """`F.dropout`, on a CPU with `keep_mask`."""
    if not training or rate == 0 or x.device.type != "cpu":
        return F.dropout(x, rate, training)
    return x * keep_mask(x.shape, rate, x.dtype)


def train_layer(layer: Layer, x: Tensor, runs: Runs, bias: Tensor | None) -> Tensor:
    """A layer in training mode: (tokens, width) to (tokens, width)."""
    config, attention, feed_forward = layer.attention.config, layer.attention, layer.feed_forward
    x = _Attention.apply(  # type: ignore[no-untyped-call]
        _Shape(runs, config.heads, config.attention_dropout, config.dropout, config.norm_eps),
        x,
        bias,
        *(attention.qkv.weight, attention.qkv.bias),
        *(attention.out.weight, attention.out.bias),
        *(attention.norm.weight, attention.norm.bias),
    )
    return _FeedForward.apply(  # type: ignore[no-untyped-call]
        (config.activation, config.dropout, config.norm_eps),
        x,
        *(feed_forward.up.weight, feed_forward.up.bias),
        *(feed_forward.down.weight, feed_forward.down.bias),
        *(feed_forward.norm.weight, feed_forward.norm.bias),
    )


class Table(nn.Embedding):
    """An embedding whose gradient, on a CPU, lies in the same memory step after step.

    It is as large as the table though a batch fills a few rows of it, and new memory, which the system hands out page by
    page, costs ten times what zeros in the old do.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self._memory = _Memory()

    def forward(self, ids: Tensor) -> Tensor:
        if self.weight.device.type != "cpu" or not (self.weight.requires_grad and torch.is_grad_enabled()):
            return super().forward(ids)
        return _LookUp.apply(self.weight, ids, self._memory)  # type: ignore[no-untyped-call]


class _Memory:
    """Zeros in the memory of those before, once nobody refers to them any more."""

    def __init__(self) -> None:
        self.array: NDArray[np.float32] | None = None
        self.lent: Callable[[], object] = lambda: None

    def __reduce__(self) -> tuple[type[_Memory], tuple[()]]:
        return _Memory, ()  # a copy has memory of its own

    def zeros_like(self, weight: Tensor) -> Tensor:
        if weight.dtype != torch.float32 or self.lent() is not None:
            return torch.zeros_like(weight, memory_format=torch.contiguous_format)
        if self.array is None or self.array.shape != weight.shape:
            self.array = np.empty(weight.shape, np.float32)
        view = self.array.view()  # lives as long as the last tensor that is made of it
        self.lent = weakref.ref(view)
        return torch.from_numpy(view).zero_()


class _LookUp(torch.autograd.Function):
    """F.embedding."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, memory: _Memory) -> Tensor:
        ctx.memory = memory
        ctx.save_for_backward(weight, ids)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, ids = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        return ctx.memory.zeros_like(weight).index_add_(0, ids.reshape(-1), rows), None, None


class _Shape(NamedTuple):
    """What attention has to know besides tensors."""

    runs: Runs
    heads: int
    attention_dropout: float
    dropout: float
    eps: float

    def rows(self) -> Iterator[tuple[slice, int, int]]:
        """Where each run lies, how many sequences it has and how long they are."""
        start = 0
        for count, length in self.runs:
            yield slice(start, start + count * length), count, length
            start += count * length


class _Attention(torch.autograd.Function):
    """Attention.forward on packed sequences."""

    @staticmethod
    def forward(ctx: Any, shape: _Shape, x: Tensor, bias: Tensor | None, *parameters: Tensor) -> Tensor:
        qkv_weight, qkv_bias, out_weight, out_bias, *norm = parameters
        qkv = torch.addmm(qkv_bias, x, qkv_weight.t())  # (tokens, 3 * width)
        found, kept = _attend(shape, qkv, bias)
        mixed = torch.addmm(out_bias, found, out_weight.t())
        y, *sums = _add_and_norm(x, mixed, shape.dropout, shape.eps, norm)
        ctx.shape = shape
        ctx.save_for_backward(x, bias, found, *parameters, *sums, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, found, qkv_weight, _, out_weight, _, gain, shift, total, mean, scale, mask, *kept = ctx.saved_tensors
        learns = ctx.needs_input_grad
        around, back, *norm = _norm_backward(grad, (total, mean, scale, mask), gain, shift, learns[7:9])
        out = _weight_gradients(back, found, learns[5:7])
        back, bias_grad = _attend_backward(ctx.shape, back @ out_weight, bias, kept, learns[2])
        qkv = _weight_gradients(back, x, learns[3:5])
        before = around.addmm_(back, qkv_weight) if learns[1] else None
        return None, before, bias_grad, *qkv, *out, *norm


class _FeedForward(torch.autograd.Function):
    """FeedForward.forward."""

    @staticmethod
    def forward(ctx: Any, settings: tuple[str, float, float], x: Tensor, *parameters: Tensor) -> Tensor:
        up_weight, up_bias, down_weight, down_bias, *norm = parameters
        activation, rate, eps = settings
        inner = torch.addmm(up_bias, x, up_weight.t())  # (tokens, feed_forward)
        active = ACTIVATIONS[activation][0](inner)
        mixed = torch.addmm(down_bias, active, down_weight.t())
        y, *sums = _add_and_norm(x, mixed, rate, eps, norm)
        ctx.activation = activation
        ctx.save_for_backward(x, inner, active, *parameters, *sums)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, active, up_weight, _, down_weight, _, gain, shift, *sums = ctx.saved_tensors
        learns = ctx.needs_input_grad
        around, back, *norm = _norm_backward(grad, sums, gain, shift, learns[6:8])
        down = _weight_gradients(back, active, learns[4:6])
        back = ACTIVATIONS[ctx.activation][1](back @ down_weight, inner)
        up = _weight_gradients(back, x, learns[2:4])
        before = around.addmm_(back, up_weight) if learns[1] else None
        return None, before, *up, *down, *norm


def _attend(shape: _Shape, qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """What each token found (tokens, width), and three tensors of each run for the way back."""
    heads, size = shape.heads, qkv.shape[1] // (3 * shape.heads)
    found = qkv.new_empty(len(qkv), heads * size)
    kept: list[Tensor | None] = []
    for rows, count, length in shape.rows():
        split = qkv[rows].view(count, length, 3, heads, size).permute(2, 0, 3, 1, 4).contiguous()
        query, key, value = split = split.view(3, count * heads, length, size)
        query.mul_(size**-0.5)
        scores = torch.bmm(query, key.mT)  # (count * heads, length, length)
        if bias is not None:
            scores.view(count, heads, length, length).add_(bias[:, :, :length, :length])
        shares = torch.softmax(scores, -1, out=scores)
        mask = keep_mask(shares.shape, shape.attention_dropout, qkv.dtype) if shape.attention_dropout else None
        mixed = torch.bmm(shares if mask is None else shares * mask, value)
        found[rows].view(count, length, heads, size).copy_(mixed.view(count, heads, length, size).transpose(1, 2))
        kept += [split, shares, mask]
    return found, kept


def _attend_backward(
    shape: _Shape, grad: Tensor, bias: Tensor | None, kept: Sequence[Tensor | None], bias_learns: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of queries, keys and values side by side, (tokens, 3 * width), and of the bias."""
    heads, size = shape.heads, grad.shape[1] // shape.heads
    back = grad.new_empty(len(grad), 3 * heads * size)
    bias_grad = torch.zeros_like(bias) if bias is not None and bias_learns else None
    tensors = iter(kept)
    for (rows, count, length), split, shares, mask in zip(shape.rows(), tensors, tensors, tensors, strict=True):
        split, shares = cast("tuple[Tensor, Tensor]", (split, shares))
        query, key, value = split
        found = grad[rows].view(count, length, heads, size).transpose(1, 2).reshape(count * heads, length, size)
        gradients = torch.empty_like(split)
        torch.bmm((shares if mask is None else shares * mask).mT, found, out=gradients[2])
        scores = torch.bmm(found, value.mT)
        if mask is not None:
            scores.mul_(mask)
        scores = aten._softmax_backward_data.out(scores, shares, -1, shares.dtype, grad_input=scores)
        torch.bmm(scores, key, out=gradients[0]).mul_(size**-0.5)
        torch.bmm(scores.mT, query, out=gradients[1])
        side_by_side = back[rows].view(count, length, 3, heads, size)
        side_by_side.copy_(gradients.view(3, count, heads, length, size).permute(1, 3, 0, 2, 4))
        if bias_grad is not None:
            bias_grad[0, :, :length, :length] += scores.view(count, heads, length, length).sum(0)
    return back, bias_grad


def _add_and_norm(
    x: Tensor, mixed: Tensor, rate: float, eps: float, norm: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """norm(x + dropout(mixed)), and what its way back needs: the sum, its mean and scale, the mask.

    `mixed` is overwritten.
    """
    mask = keep_mask(x.shape, rate, x.dtype) if rate else None
    total = torch.add(x, mixed, out=mixed) if mask is None else torch.addcmul(x, mixed, mask, out=mixed)
    y, mean, scale = aten.native_layer_norm(total, x.shape[-1:], *norm, eps)
    return y, total, mean, scale, mask


def _norm_backward(
    grad: Tensor, sums: Sequence[Tensor | None], gain: Tensor, shift: Tensor, learns: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, of `mixed` and of the norm's two parameters."""
    total, mean, scale, mask = sums
    assert total is not None
    around, *norm = aten.native_layer_norm_backward(
        grad, total, total.shape[-1:], mean, scale, gain, shift, [True, *learns]
    )
    return around, around if mask is None else around * mask, norm[0], norm[1]


def _weight_gradients(back: Tensor, x: Tensor, learns: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Of a linear layer's weight and bias, from the gradient of what came out and from what went in."""
    return back.t() @ x if learns[0] else None, back.sum(0) if learns[1] else None
