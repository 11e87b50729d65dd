"""BERT, whole, in one file: token ids in, one vector per token out.

    encoder = Encoder(EncoderConfig())            # a randomly initialised bert-base
    hidden = encoder(ids, mask, segments)         # (batch, tokens, width)
    sentence = pool(hidden, mask, "mean")         # (batch, width)

    hidden = encoder.packed(packed)               # (tokens, width): sequences end to end, no padding anywhere
    sentence = pool_packed(hidden, packed, "mean")

The layers are those of Devlin et al. 2019 (arXiv:1810.04805): embeddings, then N times self-attention and
feed-forward, each followed by dropout, a residual sum and LayerNorm ("post-norm"). MPNet (Song et al. 2020,
arXiv:2004.09297) is the same network with three differences, all of them in `EncoderConfig`: a relative attention
bias shared by all layers, positions that start after the padding id, and no segment embeddings.

The layers do not care how sequences are laid out: only attention has to know which tokens belong together, and it is
handed to them as a function. `fused.py` computes the same as `packed` with kernels of our own, on a GPU.

Published weights are read and written by `pretrained.py`; nothing here knows their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody reads

from minbert.errors import MinbertError
from minbert.model.cpu_ops import Table, dropout
from minbert.model.packed import Packed, Runs

Attend = Callable[[Tensor], Tensor]
"""Queries, keys and values side by side (..., 3 * width) to what each token found (..., width)."""
Pooling = Literal["cls", "pooler", "mean", "max", "weighted", "tokens"]
"""How the hidden states of a sequence become one vector; "tokens" leaves them as they are, for masked tasks."""
POOLINGS: tuple[Pooling, ...] = ("cls", "pooler", "mean", "max")
"""Those that make one vector of nothing but the hidden states."""

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x),
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": lambda x: F.relu(x),
    "silu": lambda x: F.silu(x),
}


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder. The defaults are bert-base-uncased."""

    kind: Literal["bert", "mpnet"] = "bert"
    vocab_size: int = 30522
    width: int = 768
    layers: int = 12
    heads: int = 12
    feed_forward: int = 3072
    positions: int = 512
    """Rows of the position table; for MPNet two of them are never used (see `max_tokens`)."""
    segments: int = 2
    """Rows of the segment table; 0 leaves it out."""
    activation: str = "gelu"
    norm_eps: float = 1e-12
    pad_id: int = 0
    dropout: float = 0.1
    attention_dropout: float = 0.1
    relative_buckets: int = 0
    """Buckets of the relative attention bias; 0 leaves it out."""

    @property
    def first_position(self) -> int:
        """MPNet counts positions from the padding id + 1, as RoBERTa does."""
        return self.pad_id + 1 if self.kind == "mpnet" else 0

    @property
    def max_tokens(self) -> int:
        return self.positions - self.first_position


class Embeddings(nn.Module):
    """Token + position + segment, normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Table(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.segments = nn.Embedding(config.segments, config.width) if config.segments else None
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)

    def forward(self, ids: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        summed = self.tokens(ids) + self.positions(positions)  # (..., tokens, width)
        if self.segments is not None:
            summed = summed + (self.segments.weight[0] if segments is None else self.segments(segments))
        return dropout(self.norm(summed), self.config.dropout, self.training)


class Attention(nn.Module):
    """Every token looks at every real token of its own sequence, then add-and-norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.width, 3 * config.width)  # queries, keys and values in one product
        self.out = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        return self._add(x, attend(self.qkv(x)))  # (..., tokens, width)

    def first(self, x: Tensor, batch: Packed, bias: Tensor | None) -> Tensor:
        """The same for the first token of each packed sequence, where nobody reads the others': (sequences, width).

        Each head takes its query through the weights of the keys, and its mixture of tokens through those of the
        values, instead of every token through both. The bias of the keys adds as much to all scores of a query, and
        leaves the softmax as it is.
        """
        heads, width = self.config.heads, self.config.width
        size = width // heads
        query_weight, key_weight, value_weight = self.qkv.weight.chunk(3)
        query_bias, _, value_bias = self.qkv.bias.chunk(3)
        first = x.index_select(0, batch.offsets[:-1])  # (sequences, width)
        query = F.linear(first, query_weight, query_bias).view(-1, heads, size)
        wanted = torch.einsum("shd,hdw->shw", query, key_weight.view(heads, size, width)) * size**-0.5
        mixtures, sums = [], []
        runs = zip(
            batch.runs, by_run(x, batch.runs), torch.split(wanted, [count for count, _ in batch.runs]), strict=True
        )
        for (_, length), tokens, asked in runs:
            scores = asked @ tokens.mT  # (count, heads, length)
            if bias is not None:
                scores = scores + bias[:, :, 0, :length]
            shares = dropout(scores.softmax(-1), self.config.attention_dropout, self.training)
            mixtures.append(shares @ tokens)  # (count, heads, width)
            sums.append(shares.sum(-1, keepdim=True))  # 1, but for dropout
        found = torch.einsum("shw,hdw->shd", torch.cat(mixtures), value_weight.view(heads, size, width))
        found = found + torch.cat(sums) * value_bias.view(heads, size)
        return self._add(first, found.reshape(-1, width))

    def _add(self, x: Tensor, found: Tensor) -> Tensor:
        return self.norm(x + dropout(self.out(found), self.config.dropout, self.training))


class FeedForward(nn.Module):
    """Each token for itself: up, activation, down, then add-and-norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(config.width, config.feed_forward)
        self.down = nn.Linear(config.feed_forward, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        inner = ACTIVATIONS[self.config.activation](self.up(x))  # (batch, tokens, feed_forward)
        return self.norm(x + dropout(self.down(inner), self.config.dropout, self.training))


class Layer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        return self.feed_forward(self.attention(x, attend))

    def first(self, x: Tensor, batch: Packed, bias: Tensor | None) -> Tensor:
        return self.feed_forward(self.attention.first(x, batch, bias))


RunLayer = Callable[[Layer, Tensor, Runs, Tensor | None], Tensor]
"""A layer, packed hidden states, their runs and attention's bias to the hidden states after the layer."""


class Pooler(nn.Module):
    """BERT's own sentence vector: tanh of a linear layer over the first token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    @property
    def is_untrained(self) -> bool:
        """Is the bias still 0, as it begins? Then the weights are random, whatever file they come from."""
        return not self.dense.bias.any()

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden[:, 0]))  # (batch, width)


class Encoder(nn.Module):
    """Token ids to hidden states.

    Args:
        config: the shape.
        generator: where the random initial weights come from; without it, torch's own.
    """

    def __init__(self, config: EncoderConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if config.width % config.heads:
            raise MinbertError(f"width {config.width} cannot be divided among {config.heads} attention heads")
        if config.activation not in ACTIVATIONS:
            raise MinbertError(f'unknown activation "{config.activation}"; known: {", ".join(ACTIVATIONS)}')
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.pooler = Pooler(config.width)
        self.relative_bias = nn.Embedding(config.relative_buckets, config.heads) if config.relative_buckets else None
        initialise(self, generator)

    def forward(self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Read a batch of sequences, padded on the right.

        Args:
            ids: token ids, (batch, tokens).
            mask: True at real tokens, (batch, tokens); without it every token is real.
            segments: 0 for the first text and 1 for the second of a pair, (batch, tokens); without it all 0.
                A variant without segment embeddings ignores it.

        Returns:
            Hidden states of the last layer, (batch, tokens, width). At padding they mean nothing.
        """
        tokens = ids.shape[1]
        self._check(ids, tokens)
        first = self.config.first_position
        positions = torch.arange(first, first + tokens, device=ids.device)
        bias = self._attention_bias(tokens, mask)
        x = self.embeddings(ids, positions, segments)
        for layer in self.layers:
            x = layer(x, lambda qkv: self._attend(qkv, bias))
        return x

    def packed(self, batch: Packed, *, only_first: bool = False, run: RunLayer | None = None) -> Tensor:
        """Read sequences that lie end to end, sorted by length.

        Those of equal length are one matrix without padding, and attention takes one such run after the other.

        Args:
            batch: the sequences.
            only_first: of the last layer compute the first token of each sequence alone.
            run: another way to compute a layer.

        Returns:
            Hidden states of the last layer, (tokens, width), or (sequences, width) of the first tokens.
        """
        longest = max(length for _, length in batch.runs)
        self._check(batch.ids, longest)
        bias = self._attention_bias(longest, None)

        def attend(qkv: Tensor) -> Tensor:
            found = []
            for rows in by_run(qkv, batch.runs):
                near = None if bias is None else bias[:, :, : rows.shape[1], : rows.shape[1]]
                found.append(self._attend(rows, near).flatten(0, 1))
            return torch.cat(found)  # (tokens, width)

        x = self.embeddings(batch.ids, batch.positions, batch.segments)
        layers = cast("list[Layer]", list(self.layers))
        for layer in layers[:-1] if only_first else layers:
            x = layer(x, attend) if run is None else run(layer, x, batch.runs, bias)
        return layers[-1].first(x, batch, bias) if only_first else x

    def _attend(self, qkv: Tensor, bias: Tensor | None) -> Tensor:
        batch, tokens, width = qkv.shape[0], qkv.shape[1], self.config.width
        heads = self.config.heads
        split = qkv.view(batch, tokens, 3, heads, width // heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, head_dim)
        dropout = self.config.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
        return mixed.transpose(1, 2).reshape(batch, tokens, width)  # heads side by side again

    def _check(self, ids: Tensor, longest: int) -> None:
        if ids.numel() == 0:
            raise MinbertError(f"an empty batch: ids have shape {tuple(ids.shape)}; expected at least one token")
        if longest > self.config.max_tokens:
            raise MinbertError(
                f"a sequence of {longest} tokens; this encoder has positions for {self.config.max_tokens}"
            )
        # On a GPU reading the ids back would stall the queue: there they are checked before they travel.
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            self.check_ids(ids)

    def check_ids(self, ids: Tensor) -> None:
        """Ids that the embedding table has no row for are an error of the input."""
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < 0 or high >= self.config.vocab_size:
            wrong = low if low < 0 else high
            raise MinbertError(f"token id {wrong}; expected 0 to {self.config.vocab_size - 1} (the vocabulary)")

    def _attention_bias(self, tokens: int, mask: Tensor | None) -> Tensor | None:
        """What attention adds to its scores: minus infinity at padding and, for MPNet, the relative bias."""
        keep = None if mask is None else mask.bool()[:, None, None, :]  # (batch, 1, 1, tokens)
        if self.relative_bias is None:
            return keep
        buckets = relative_buckets(tokens, self.config.relative_buckets, device=self.relative_bias.weight.device)
        bias = self.relative_bias(buckets).permute(2, 0, 1).unsqueeze(0)  # (1, heads, tokens, tokens)
        return bias if keep is None else bias.masked_fill(~keep, -math.inf)  # (batch, heads, tokens, tokens)


def relative_buckets(tokens: int, buckets: int, *, max_distance: int = 128, device: torch.device) -> Tensor:
    """Which bias row serves each (query, key) distance: half the rows look back, half ahead; in each half the first
    half are exact distances and the rest grow with the logarithm up to `max_distance` (T5's scheme).

    Returns:
        (tokens, tokens), query by key.
    """
    position = torch.arange(tokens, device=device)
    return bucket_of(position[:, None] - position[None, :], buckets, max_distance)


def bucket_of(distance: Tensor, buckets: int, max_distance: int = 128) -> Tensor:
    """The bias row of each distance, query - key: positive looks back."""
    half = buckets // 2
    exact = half // 2
    far = distance.abs().clamp(min=exact)
    steps = torch.log(far.float() / exact) / math.log(max_distance / exact) * (half - exact)
    logarithmic = (exact + steps.long()).clamp(max=half - 1)
    return torch.where(distance.abs() < exact, distance.abs(), logarithmic) + half * (distance < 0)


def pool(hidden: Tensor, mask: Tensor | None, how: Pooling, pooler: Pooler | None = None) -> Tensor:
    """One vector per sequence, (batch, width), from the hidden states of its tokens.

    Args:
        hidden: (batch, tokens, width).
        mask: True at real tokens, (batch, tokens); without it every token is real.
        how: the first token, the first token through the pooler, the mean or the maximum over real tokens.
        pooler: the encoder's, needed for "pooler".
    """
    if how == "cls":
        return hidden[:, 0]
    if how == "pooler":
        if pooler is None:
            raise ValueError('pooling "pooler" needs the encoder\'s pooler')
        return pooler(hidden)
    if how == "weighted":
        raise ValueError('pooling "weighted" is for packed sequences, which have weights')
    if mask is None:
        return hidden.mean(1) if how == "mean" else hidden.amax(1)
    real = mask.bool().unsqueeze(-1)  # (batch, tokens, 1)
    if how == "mean":
        return (hidden * real).sum(1) / real.sum(1)
    return hidden.masked_fill(~real, -math.inf).amax(1)


def pool_packed(
    hidden: Tensor, batch: Packed, how: Pooling, pooler: Pooler | None = None, *, by_runs: bool = True
) -> Tensor:
    """The same from packed sequences: (tokens, width) to (sequences, width), a run of equal lengths at a time, or
    (for a GPU, where each run would be launches of its own) by the sequences' offsets. "weighted" is the mean with the
    tokens' weights; "tokens" stay (tokens, width).
    """
    if how == "tokens":
        return hidden
    if how == "weighted":
        if batch.weights is None:
            raise MinbertError('pooling is "weighted", but the tokens have no weights; expected them at tokenization')
        weights = batch.weights.unsqueeze(-1)  # (tokens, 1)
        shares = sum_packed(weights, batch, by_runs=by_runs).clamp(min=1e-9)  # an empty sequence's are 0
        return sum_packed(hidden.float() * weights, batch, by_runs=by_runs) / shares
    if by_runs:
        token = "cls" if how == "pooler" else how
        vectors = torch.cat([pool(rows, None, token) for rows in by_run(hidden, batch.runs)])
    elif how in ("mean", "max"):
        vectors = torch.segment_reduce(hidden.float(), how, offsets=batch.offsets, unsafe=True)
    else:
        first = batch.offsets[:-1].clamp(max=len(hidden) - 1)  # a fixed layout has empty sequences at its end
        vectors = hidden.index_select(0, first)
    return pool(vectors.float().unsqueeze(1), None, how, pooler) if how == "pooler" else vectors


def sum_packed(x: Tensor, batch: Packed, *, by_runs: bool) -> Tensor:
    """Packed rows, (tokens, ...), added up over each sequence, (sequences, ...)."""
    if by_runs:
        return torch.cat([rows.sum(1) for rows in by_run(x, batch.runs)])
    return torch.segment_reduce(x, "sum", offsets=batch.offsets, unsafe=True)


def by_run(x: Tensor, runs: Runs) -> list[Tensor]:
    """Packed rows, (tokens, ...), as a matrix for each run, (sequences, length, ...)."""
    parts = torch.split(x, [count * length for count, length in runs])
    return [part.view(*run, *x.shape[1:]) for part, run in zip(parts, runs, strict=True)]


def initialise(module: nn.Module, generator: torch.Generator | None, std: float = 0.02) -> None:
    """BERT's initial weights: normal(0, 0.02) matrices, zero biases, LayerNorm at one and zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std, generator=generator)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
