"""The encoder with kernels of our own, for a GPU: the same network as `Encoder.packed`, in a few launches a layer.

    fused = FusedEncoder(encoder, torch.bfloat16)
    fused.refresh()                       # the low-precision copies of the weights, after each change of them
    hidden = fused(packed)                # (tokens, width)

The parameters stay those of `encoder`, in float32; products run on copies in `dtype`, and the gradients of the weights
come out of them in float32 at once. The whole encoder is one autograd function with its backward pass written out, so
that what goes round a sublayer (the residual) is added by the product itself instead of in a pass of its own, and the
sums over rows (gradients of biases and norms) of all layers are finished together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from minbert.model.attention_kernels import Bias, Blocks, attention, attention_backward, bias_gradient, bias_shares
from minbert.model.encoder import Encoder, EncoderConfig, Layer, bucket_of
from minbert.model.kernels import (
    KINDS,
    ColumnSums,
    Dropout,
    activation,
    activation_backward,
    embed,
    norm,
    norm_backward,
    scatter_rows,
)
from minbert.model.packed import SHORTEST, Packed

EMBEDDINGS = 5  # parameters before the layers': three tables, and the norm's two
MATRICES = 8  # of a layer: four weights with their biases
PARAMETERS = 12  # of a layer: those, and its two norms
SITES = 3  # places of a layer that drop something: attention, and before each norm
SAVED = 11  # tensors that a layer keeps for its way back
BESIDE = 12  # pieces of work that may be under way beside the way back: those of two layers
Found = TypeVar("Found")


@dataclass(frozen=True)
class Pass:
    """What one run through the encoder has to know besides the parameters."""

    config: EncoderConfig
    batch: Packed
    blocks: Blocks
    bias: Bias | None
    seeds: Tensor
    dropout: float
    attention_dropout: float
    dtype: torch.dtype
    low: Sequence[Tensor]
    """Copies of the layers' weights and biases in `dtype`, eight a layer."""
    second: torch.cuda.Stream | None
    """For work beside the way back."""

    def dropouts(self, layer: int) -> tuple[Dropout, Dropout, Dropout]:
        """Of attention, of its output, of the feed-forward layer's output."""
        first = 1 + SITES * layer
        rates = (self.attention_dropout, self.dropout, self.dropout)
        found = [Dropout(rate, self.seeds, first + number) for number, rate in enumerate(rates)]
        return found[0], found[1], found[2]

    def weights(self, layer: int) -> Sequence[Tensor]:
        return self.low[MATRICES * layer : MATRICES * (layer + 1)]


class Beside:
    """Work that nobody waits for until the end of the pass, on a stream of its own: the gradients of weights keep the
    cores busy that the kernels on the way back, which wait for memory or are small, leave idle. Without a second stream
    it is done at once.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self.under_way: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def __call__(self, work: Callable[..., Found], *needed: Tensor) -> Found:
        """What `work` makes of the tensors, which are kept until it is done, so that nothing else gets their memory."""
        if self.stream is None:
            return work(*needed)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            found = work(*needed)
        self.under_way.append((self.stream.record_event(), needed))
        self.wait(BESIDE)
        return found

    def wait(self, left: int = 0) -> None:
        """Until at most `left` pieces of work are under way."""
        while len(self.under_way) > left:
            torch.cuda.current_stream().wait_event(self.under_way.popleft()[0])


def supports(config: EncoderConfig) -> bool:
    """Do the kernels know this shape? A head must be a power of two wide, at least 16, and there must be positions for
    the shortest of blocks.
    """
    size = config.width // config.heads
    fits = size >= 16 and size & (size - 1) == 0 and config.max_tokens >= SHORTEST
    return fits and config.activation in KINDS


class FusedEncoder:
    """Runs an encoder's parameters through the kernels.

    Args:
        encoder: whose parameters; dropout is on while it is in training mode.
        dtype: of products and of what lies between the layers.
    """

    def __init__(self, encoder: Encoder, dtype: torch.dtype) -> None:
        self.encoder, self.dtype = encoder, dtype
        self.layers = cast("list[Layer]", list(encoder.layers))
        self.matrices = [parameter for layer in self.layers for parameter in _matrices(layer)]
        same = dtype == torch.float32
        self.low = [value if same else torch.empty_like(value, dtype=dtype) for value in self.matrices]
        reach = encoder.config.max_tokens
        distances = torch.arange(1 - reach, reach, device=self.matrices[0].device)
        buckets = encoder.config.relative_buckets
        self.buckets = bucket_of(distances, buckets).int() if buckets else None
        self.second = torch.cuda.Stream() if distances.is_cuda else None  # type: ignore[no-untyped-call]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights as they are now."""
        if self.dtype != torch.float32:
            torch._foreach_copy_(self.low, self.matrices)

    def copies(self) -> dict[Tensor, Tensor]:
        """The copy of each weight that has one, for an optimizer that keeps them up to date by itself."""
        return {} if self.dtype == torch.float32 else dict(zip(self.matrices, self.low, strict=True))

    def __call__(self, batch: Packed) -> Tensor:
        encoder, config = self.encoder, self.encoder.config
        table = None if encoder.relative_bias is None else encoder.relative_bias.weight
        run = Pass(
            config,
            batch,
            Blocks(batch.blocks, batch.block, batch.short),
            self._bias(table),
            self._seeds(),
            config.dropout if encoder.training else 0.0,
            config.attention_dropout if encoder.training else 0.0,
            self.dtype,
            self.low,
            self.second,
        )
        first = encoder.embeddings
        segments = None if first.segments is None else first.segments.weight
        parameters = [first.tokens.weight, first.positions.weight, segments, first.norm.weight, first.norm.bias]
        for layer in self.layers:
            norms = (layer.attention.norm, layer.feed_forward.norm)
            parameters += [*_matrices(layer), *(value for part in norms for value in (part.weight, part.bias))]
        if not torch.is_grad_enabled():
            return _forward(run, parameters, keep=False)[0]
        return Encode.apply(run, *parameters, table)  # type: ignore[no-untyped-call]

    def _seeds(self) -> Tensor:
        places, device = 1 + SITES * len(self.layers), self.matrices[0].device
        if not self.encoder.training:
            return torch.zeros(places, dtype=torch.int32, device=device)
        return torch.randint(-(2**31), 2**31 - 1, (places,), dtype=torch.int32, device=device)

    def _bias(self, table: Tensor | None) -> Bias | None:
        if table is None or self.buckets is None:
            return None
        by_distance = table.detach().float()[self.buckets].t().contiguous()  # (heads, distances)
        return Bias(by_distance, self.buckets, table.shape[0])


class Encode(torch.autograd.Function):
    """Parameters to hidden states: the embeddings' five, twelve a layer, and the relative bias' table."""

    @staticmethod
    def forward(ctx: Any, run: Pass, *parameters: Tensor | None) -> Tensor:
        out, saved = _forward(run, parameters, keep=True)
        ctx.run = run
        ctx.heights = [0 if table is None else len(table) for table in parameters[:3]]
        ctx.save_for_backward(*saved, *parameters[3:4], *_norm_weights(parameters))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: Pass = ctx.run
        layers, width = run.config.layers, run.config.width
        saved = list(ctx.saved_tensors)
        summed, moments = saved[:2]
        gammas = saved[2 + SAVED * layers :]
        needed = ctx.needs_input_grad[1:]
        grads: list[Tensor | None] = [None] * len(needed)
        sums = ColumnSums.of(layers * 6 * width + 2 * width, grad.device)
        ones = torch.ones((8, len(grad)), device=grad.device, dtype=grad.dtype)
        shares = bias_shares(run.bias, run.config.heads, run.blocks)
        learns = [needed[EMBEDDINGS + PARAMETERS * number] for number in range(layers)]
        lowest = 0 if any(needed[:EMBEDDINGS]) or needed[-1] else learns.index(True) if any(learns) else layers
        grad = grad.contiguous()
        beside, early = Beside(run.second), Beside(run.second)
        embedded = any(needed[:EMBEDDINGS])
        places = early(partial(_places, run.batch, ctx.heights, grad)) if embedded else None
        for number in reversed(range(lowest, layers)):
            kept = saved[2 + SAVED * number : 2 + SAVED * (number + 1)]
            weights = gammas[1 + 2 * number : 3 + 2 * number]
            at = EMBEDDINGS + PARAMETERS * number
            learn = learns[number]
            grad, found = _layer_backward(run, number, grad, kept, weights, shares, sums, ones, beside, learn=learn)
            added = torch.split(beside(sums.add), width)
            if learn:
                gamma_2, beta_2, bias_down, gamma_1, beta_1, bias_out = added
                w_qkv, b_qkv, w_out, w_up, b_up, w_down = found
                grads[at : at + MATRICES] = [w_qkv, b_qkv, w_out, bias_out, w_up, b_up, w_down, bias_down]
                grads[at + MATRICES : at + PARAMETERS] = [gamma_1, beta_1, gamma_2, beta_2]
        if shares is not None and run.bias is not None:
            grads[-1] = beside(partial(bias_gradient, bias=run.bias), shares)
        if places is not None:
            dropout = Dropout(run.dropout, run.seeds, 0)
            rows, _ = norm_backward(grad, summed, moments, gammas[0], dropout, sums, after=True)
            early.wait()
            grads[:EMBEDDINGS] = [*places.gradients(rows), *torch.split(sums.add(), width)]
        beside.wait()
        return None, *grads


def _forward(run: Pass, parameters: Sequence[Tensor | None], *, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """Hidden states, and what the way back needs; if that is not to be kept, a layer holds only its own."""
    config, batch = run.config, run.batch
    tokens, positions, segments, gamma, beta = parameters[:EMBEDDINGS]
    assert tokens is not None and positions is not None and gamma is not None and beta is not None
    tables = (tokens, positions, segments)
    x, summed, moments = embed(
        batch.ids, batch.positions, batch.segments, tables, gamma, beta, config.norm_eps,
        Dropout(run.dropout, run.seeds, 0), run.dtype,
    )  # fmt: skip
    saved = [summed, moments]
    for number in range(config.layers):
        at = EMBEDDINGS + PARAMETERS * number + MATRICES
        x, made = _layer_forward(run, number, x, cast("Sequence[Tensor]", parameters[at : at + 4]))
        if keep:
            saved += made
        del made
    return x, saved


def _layer_forward(run: Pass, number: int, x: Tensor, norms: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Attention and feed-forward, each with its residual and norm."""
    config, (drop_attention, drop_out, drop_down) = run.config, run.dropouts(number)
    w_qkv, b_qkv, w_out, b_out, w_up, b_up, w_down, b_down = run.weights(number)
    gamma_1, beta_1, gamma_2, beta_2 = norms
    qkv = torch.addmm(b_qkv, x, w_qkv.t())  # (tokens, 3 * width)
    mixed, lse = attention(qkv, config.heads, run.blocks, run.bias, drop_attention)
    found = torch.addmm(b_out, mixed, w_out.t())
    middle, sum_1, moments_1 = norm(found, x, gamma_1, beta_1, config.norm_eps, drop_out)
    inner = torch.addmm(b_up, middle, w_up.t())  # (tokens, feed_forward)
    active = activation(inner, config.activation)
    down = torch.addmm(b_down, active, w_down.t())
    out, sum_2, moments_2 = norm(down, middle, gamma_2, beta_2, config.norm_eps, drop_down)
    return out, [x, qkv, mixed, lse, sum_1, moments_1, middle, inner, active, sum_2, moments_2]


def _layer_backward(
    run: Pass, number: int, grad: Tensor, saved: Sequence[Tensor], gammas: Sequence[Tensor], shares: Tensor | None,
    sums: ColumnSums, ones: Tensor, beside: Beside, *, learn: bool,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """Gradients of the layer's input, and of weight and bias of qkv, weight of out, weight and bias of up, weight of
    down; those of the norms, and of the two biases just before them, go into `sums`.
    """
    x, qkv, mixed, lse, sum_1, moments_1, middle, inner, active, sum_2, moments_2 = saved
    config, (drop_attention, drop_out, drop_down) = run.config, run.dropouts(number)
    w_qkv, _, w_out, _, w_up, _, w_down, _ = run.weights(number)
    gamma_1, gamma_2 = gammas
    found: list[Tensor | None] = [None] * 6
    round_2, grad_down = norm_backward(grad, sum_2, moments_2, gamma_2, drop_down, sums)
    if learn:
        found[5] = beside(product, grad_down.t(), active)
    grad_inner = activation_backward(grad_down @ w_down, inner, config.activation)
    if learn:
        found[3:5] = (
            beside(product, grad_inner.t(), middle),
            beside(product, ones, grad_inner)[0],
        )  # the sum of the rows
    grad_middle = round_2.addmm_(grad_inner, w_up)
    round_1, grad_found = norm_backward(grad_middle, sum_1, moments_1, gamma_1, drop_out, sums)
    if learn:
        found[2] = beside(product, grad_found.t(), mixed)
    grad_qkv = attention_backward(
        grad_found @ w_out, qkv, mixed, lse, config.heads, run.blocks, run.bias, shares, drop_attention
    )
    if learn:
        found[:2] = beside(product, grad_qkv.t(), x), beside(product, ones, grad_qkv)[0]
    return round_1.addmm_(grad_qkv, w_qkv), found


@dataclass(frozen=True, eq=False)
class Places:
    """Where the gradients of a batch's rows go in the embeddings' tables."""

    tokens: tuple[Tensor, Tensor]
    """Sorted, and from which row each is."""
    table: Tensor
    """Zeros, for the tokens' gradient."""
    chosen: Tensor
    """(positions + segments, rows), 1 where a row has that position or segment."""
    positions: int

    def gradients(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the token, position and segment tables."""
        # Few different positions and segments, each in many rows: their sums are a product.
        few = product(self.chosen, rows)
        segments = few[self.positions :] if len(few) > self.positions else None
        return scatter_rows(rows, *self.tokens, self.table), few[: self.positions], segments


def _places(batch: Packed, heights: Sequence[int], like: Tensor) -> Places:
    tokens, positions, segments = heights
    numbers = torch.arange(positions + segments, device=like.device, dtype=torch.int32)[:, None]
    chosen = numbers == batch.positions
    if segments:
        chosen = chosen | (numbers == batch.segments + positions)
    table = torch.zeros((tokens, like.shape[1]), device=like.device, dtype=torch.float32)
    sorted_ids, order = torch.sort(batch.ids, stable=True)
    return Places((sorted_ids, order), table, chosen.to(like.dtype), positions)


def product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product in float32, whatever its factors are in."""
    if left.dtype == torch.float32 or left.device.type != "cuda":
        return (left @ right).float()
    return torch.mm(left, right, out_dtype=torch.float32)


def _matrices(layer: Layer) -> list[Tensor]:
    parts = (layer.attention.qkv, layer.attention.out, layer.feed_forward.up, layer.feed_forward.down)
    return [value for part in parts for value in (part.weight, part.bias)]


def _norm_weights(parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The two gammas of each layer."""
    layers = range(EMBEDDINGS, len(parameters) - PARAMETERS, PARAMETERS)
    return [parameters[at + place] for at in layers for place in (MATRICES, MATRICES + 2)]
