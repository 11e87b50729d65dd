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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

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
from minbert.model.weight_gradients import FEW, AtOnce, Beside, Together, WeightGradients, product

EMBEDDINGS = 5  # parameters before the layers': three tables, and the norm's two
MATRICES = 8  # of a layer: four weights with their biases
PARAMETERS = 12  # of a layer: those, and its two norms
SITES = 3  # places of a layer that drop something: attention, and before each norm


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


class Kept(NamedTuple):
    """What the way back needs of the layers, (layers, tokens, ...); of one, used again and again, where nobody goes back."""

    x: Tensor
    """What goes in."""
    qkv: Tensor
    mixed: Tensor
    lse: Tensor
    sum_1: Tensor
    moments_1: Tensor
    middle: Tensor
    inner: Tensor
    active: Tensor
    sum_2: Tensor
    moments_2: Tensor

    @classmethod
    def of(cls, config: EncoderConfig, layers: int, tokens: int, device: torch.device, dtype: torch.dtype) -> Kept:
        def room(*shape: int, exact: bool = False) -> Tensor:
            return torch.empty((layers, *shape), device=device, dtype=torch.float32 if exact else dtype)

        wide, inner, moments = (tokens, config.width), (tokens, config.feed_forward), (tokens, 2)
        return cls(
            x=room(*wide),
            qkv=room(tokens, 3 * config.width),
            mixed=room(*wide),
            lse=room(config.heads, tokens, exact=True),
            sum_1=room(*wide),
            moments_1=room(*moments, exact=True),
            middle=room(*wide),
            inner=room(*inner),
            active=room(*inner),
            sum_2=room(*wide),
            moments_2=room(*moments, exact=True),
        )

    def layer(self, number: int) -> Kept:
        """The part of one layer."""
        return Kept(*(part[number] for part in self))


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
            return _forward(run, parameters, layers=1)[0]
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
        out, kept, first = _forward(run, parameters, layers=run.config.layers)
        ctx.run = run
        ctx.heights = [0 if table is None else len(table) for table in parameters[:3]]
        ctx.save_for_backward(*first, *kept, *parameters[3:4], *_norm_weights(parameters))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: Pass = ctx.run
        config, layers, width = run.config, run.config.layers, run.config.width
        summed, moments, *saved = ctx.saved_tensors
        kept, gammas = Kept(*saved[: len(Kept._fields)]), saved[len(Kept._fields) :]
        needed = ctx.needs_input_grad[1:]
        grads: list[Tensor | None] = [None] * len(needed)
        sums = ColumnSums.of(layers * 6 * width + 2 * width, len(grad), grad.device)
        shares = bias_shares(run.bias, config.heads, run.blocks)
        learns = [needed[EMBEDDINGS + PARAMETERS * number] for number in range(layers)]
        lowest = 0 if any(needed[:EMBEDDINGS]) or needed[-1] else learns.index(True) if any(learns) else layers
        grad = grad.contiguous()
        given = {"qkv": kept.x, "out": kept.mixed, "up": kept.middle, "down": kept.active}
        widths = {"qkv": 3 * width, "out": width, "up": config.feed_forward, "down": width}
        found = (Together if len(grad) <= FEW else AtOnce)(given, widths, learns, sums, run.second)
        early = Beside(run.second)
        embedded = any(needed[:EMBEDDINGS])
        places = early(partial(_places, run.batch, ctx.heights, grad)) if embedded else None
        for number in reversed(range(lowest, layers)):
            grad = _layer_backward(run, number, grad, kept.layer(number), gammas[1 + 2 * number :], shares, sums, found)
            found.end_layer(number)
        if shares is not None and run.bias is not None:
            grads[-1] = found.beside(partial(bias_gradient, bias=run.bias), shares)
        found.finish()
        for number in (number for number in range(layers) if learns[number]):
            at = EMBEDDINGS + PARAMETERS * number
            gamma_2, beta_2, bias_down, gamma_1, beta_1, bias_out = torch.split(found.columns[number], width)
            grads[at : at + PARAMETERS] = [
                found.weights["qkv", number], found.biases["qkv", number], found.weights["out", number], bias_out,
                found.weights["up", number], found.biases["up", number], found.weights["down", number], bias_down,
                gamma_1, beta_1, gamma_2, beta_2,
            ]  # fmt: skip
        if places is not None:
            dropout = Dropout(run.dropout, run.seeds, 0)
            rows = norm_backward(grad, summed, moments, gammas[0], dropout, sums, None)
            early.wait()
            grads[:EMBEDDINGS] = [*places.gradients(rows), *torch.split(sums.add(), width)]
        found.beside.wait()
        return None, *grads


def _forward(
    run: Pass, parameters: Sequence[Tensor | None], *, layers: int
) -> tuple[Tensor, Kept, tuple[Tensor, Tensor]]:
    """Hidden states, and what the way back needs, of so many layers and of the embeddings."""
    config, batch = run.config, run.batch
    tokens, positions, segments, gamma, beta = parameters[:EMBEDDINGS]
    assert tokens is not None and positions is not None and gamma is not None and beta is not None
    tables = (tokens, positions, segments)
    kept = Kept.of(config, layers, len(batch.ids), tokens.device, run.dtype)
    parts = [kept.layer(number) for number in range(layers)]
    x = parts[0].x
    first = embed(
        batch.ids, batch.positions, batch.segments, tables, gamma, beta, config.norm_eps,
        Dropout(run.dropout, run.seeds, 0), x,
    )  # fmt: skip
    for number in range(config.layers):
        at = EMBEDDINGS + PARAMETERS * number + MATRICES
        out = parts[number + 1].x if number + 1 < layers else torch.empty_like(x)
        norms = cast("Sequence[Tensor]", parameters[at : at + 4])
        x = _layer_forward(run, number, x, parts[number % layers], norms, out)
    return x, kept, first


def _layer_forward(run: Pass, number: int, x: Tensor, kept: Kept, norms: Sequence[Tensor], out: Tensor) -> Tensor:
    """Attention and feed-forward, each with its residual and norm."""
    config, (drop_attention, drop_out, drop_down) = run.config, run.dropouts(number)
    w_qkv, b_qkv, w_out, b_out, w_up, b_up, w_down, b_down = run.weights(number)
    gamma_1, beta_1, gamma_2, beta_2 = norms
    qkv = torch.addmm(b_qkv, x, w_qkv.t(), out=kept.qkv)  # (tokens, 3 * width)
    mixed = attention(qkv, run.blocks, run.bias, drop_attention, kept.mixed, kept.lse)
    found = torch.addmm(b_out, mixed, w_out.t())
    norm(found, x, gamma_1, beta_1, config.norm_eps, drop_out, kept.middle, kept.sum_1, kept.moments_1)
    inner = torch.addmm(b_up, kept.middle, w_up.t(), out=kept.inner)  # (tokens, feed_forward)
    down = torch.addmm(b_down, activation(inner, config.activation, kept.active), w_down.t())
    return norm(down, kept.middle, gamma_2, beta_2, config.norm_eps, drop_down, out, kept.sum_2, kept.moments_2)


def _layer_backward(
    run: Pass, number: int, grad: Tensor, kept: Kept, gammas: Sequence[Tensor], shares: Tensor | None,
    sums: ColumnSums, found: WeightGradients,
) -> Tensor:  # fmt: skip
    """The gradient of the layer's input. `found` gets those after the weights; those of the norms, and of the two biases
    just before them, go into `sums`.
    """
    config, (drop_attention, drop_out, drop_down) = run.config, run.dropouts(number)
    w_qkv, _, w_out, _, w_up, _, w_down, _ = run.weights(number)
    room = {name: found.room(name, number) for name in found.given}
    round_2 = norm_backward(grad, kept.sum_2, kept.moments_2, gammas[1], drop_down, sums, room["down"])
    found.take("down", number, room["down"])
    activation_backward(room["down"] @ w_down, kept.inner, config.activation, room["up"])
    found.take("up", number, room["up"])
    grad_middle = round_2.addmm_(room["up"], w_up)
    round_1 = norm_backward(grad_middle, kept.sum_1, kept.moments_1, gammas[0], drop_out, sums, room["out"])
    found.take("out", number, room["out"])
    attention_backward(
        room["out"] @ w_out, kept.qkv, kept.mixed, kept.lse, run.blocks, run.bias, shares, drop_attention, room["qkv"]
    )
    found.take("qkv", number, room["qkv"])
    return round_1.addmm_(room["qkv"], w_qkv)


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


def _matrices(layer: Layer) -> list[Tensor]:
    parts = (layer.attention.qkv, layer.attention.out, layer.feed_forward.up, layer.feed_forward.down)
    return [value for part in parts for value in (part.weight, part.bias)]


def _norm_weights(parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The two gammas of each layer."""
    layers = range(EMBEDDINGS, len(parameters) - PARAMETERS, PARAMETERS)
    return [parameters[at + place] for at in layers for place in (MATRICES, MATRICES + 2)]
