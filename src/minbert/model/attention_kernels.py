"""Attention over packed sequences of any length, as Triton kernels: dropout and MPNet's relative bias included.

The scheme is FlashAttention's (Dao et al. 2022, arXiv:2205.14135): a block of queries meets one block of keys after
the other, with a running maximum and sum, and the backward pass computes the weights again instead of keeping them.
A table of blocks says which rows of the packed matrix belong together, so sequences of all lengths go in one launch.
Short texts are the rule here: where no sequence is longer than one block, the backward pass is a single kernel too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minbert.model.kernels import Dropout, keep_mask

WARPS = {16: 1, 32: 2, 64: 4}  # of a program, by the size of its blocks: what was fastest
WARPS_WITH_BIAS = {16: 1, 32: 4, 64: 4}
WARPS_BACK_WITH_BIAS = {16: 1, 32: 4, 64: 8}


@dataclass(frozen=True)
class Blocks:
    """Which rows attend to each other."""

    table: Tensor
    """(blocks, 3) int32: first row of the sequence, its length, and the block's first token in it; length 0: nothing."""
    size: int
    """Queries or keys that a program handles at once."""
    short: bool
    """No sequence is longer than a block."""


@dataclass(frozen=True)
class Bias:
    """A relative bias, by head and by distance of query and key."""

    by_distance: Tensor
    """(heads, 2 * reach - 1) float32, at query - key + reach - 1."""
    buckets: Tensor
    """(2 * reach - 1,) int32: which row of the learned table serves a distance."""
    rows: int
    """Of that table."""

    @property
    def reach(self) -> int:
        return (self.by_distance.shape[1] + 1) // 2


@triton.jit(do_not_specialize=["site"])
def _attention_forward(
    qkv, out, lse, blocks, bias, seeds, site, scale, tokens, threshold, keep_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, REACH: tl.constexpr,
    DROPOUT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One block of queries of one sequence and one head."""
    block, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(blocks + 3 * block).to(tl.int64)
    length = tl.load(blocks + 3 * block + 1)
    first = tl.load(blocks + 3 * block + 2)
    if first >= length:
        return
    width: tl.constexpr = HEADS * DIM
    lane = tl.arange(0, DIM)
    rows = first + tl.arange(0, BLOCK)
    real = rows < length
    at = (start + rows)[:, None] * (3 * width) + head * DIM + lane[None, :]
    query = tl.load(qkv + at, mask=real[:, None], other=0.0)  # (BLOCK, DIM)
    seed = tl.load(seeds + site)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, DIM], tl.float32)
    for offset in range(0, length, BLOCK):
        keys = offset + tl.arange(0, BLOCK)
        there = keys < length
        at = (start + keys)[:, None] * (3 * width) + head * DIM + lane[None, :]
        key = tl.load(qkv + at + width, mask=there[:, None], other=0.0)
        value = tl.load(qkv + at + 2 * width, mask=there[:, None], other=0.0)
        if EXACT:
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # (BLOCK, BLOCK)
        else:
            score = tl.dot(query, tl.trans(key)) * scale
        if REACH:
            both = real[:, None] & there[None, :]
            distance = rows[:, None] - keys[None, :] + (REACH - 1)
            score += tl.load(bias + head * (2 * REACH - 1) + distance, mask=both, other=0.0)
        score = tl.where(there[None, :], score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(weight, 1)
        if DROPOUT:
            weight = tl.where(keep_mask(seed, head * tokens + start + rows, keys, threshold), weight, 0.0)
        if EXACT:
            mixed = mixed * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        else:
            mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        highest = higher
    mixed = mixed * (keep_scale / total)[:, None]
    at = (start + rows)[:, None] * width + head * DIM + lane[None, :]
    tl.store(out + at, mixed, mask=real[:, None])
    tl.store(lse + head * tokens + start + rows, highest + tl.log(total), mask=real)


@triton.jit
def _by_bucket(values, buckets, apart, BLOCK: tl.constexpr, REACH: tl.constexpr, BUCKETS: tl.constexpr):
    """The sum of a square of numbers over each bucket of distances; `apart` is the first row's number less the first
    column's. Row i is turned by i places, so that equal distances lie in a column: those of column c are c to the right
    of the diagonal or, where the turn went round the end, BLOCK - c to the left of it.
    """
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    turned = tl.gather(values, (row + column) % BLOCK, 1)
    right = tl.sum(tl.where(row + column < BLOCK, turned, 0.0), 0)
    left = tl.sum(tl.where(row + column < BLOCK, 0.0, turned), 0)
    place = apart - tl.arange(0, BLOCK) + (REACH - 1)
    number = tl.arange(0, BUCKETS)[:, None]
    near = tl.load(buckets + place, mask=(place >= 0) & (place < 2 * REACH - 1), other=0)
    found = tl.sum(tl.where(near[None, :] == number, right[None, :], 0.0), 1)
    place += BLOCK
    near = tl.load(buckets + place, mask=(place >= 0) & (place < 2 * REACH - 1), other=0)
    return found + tl.sum(tl.where(near[None, :] == number, left[None, :], 0.0), 1)


@triton.jit(do_not_specialize=["site"])
def _attention_backward(
    qkv, out, lse, grad_out, grad_qkv, blocks, bias, buckets, grad_bias, seeds, site, scale, tokens, threshold, keep_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, REACH: tl.constexpr,
    BUCKETS: tl.constexpr, SHORT: tl.constexpr, DROPOUT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One block of keys of one sequence and one head: the gradients of its keys and values and, where every sequence
    fits into one block (SHORT), of the queries too.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(blocks + 3 * block).to(tl.int64)
    length = tl.load(blocks + 3 * block + 1)
    first = tl.load(blocks + 3 * block + 2)
    bucket_sums = tl.zeros([BUCKETS], tl.float32)
    if first < length:
        width: tl.constexpr = HEADS * DIM
        lane = tl.arange(0, DIM)
        keys = first + tl.arange(0, BLOCK)
        there = keys < length
        at_keys = (start + keys)[:, None] * (3 * width) + head * DIM + lane[None, :]
        key = tl.load(qkv + at_keys + width, mask=there[:, None], other=0.0)  # (BLOCK, DIM)
        value = tl.load(qkv + at_keys + 2 * width, mask=there[:, None], other=0.0)
        seed = tl.load(seeds + site)
        grad_key = tl.zeros([BLOCK, DIM], tl.float32)
        grad_value = tl.zeros([BLOCK, DIM], tl.float32)
        for offset in range(0, length, BLOCK):
            rows = offset + tl.arange(0, BLOCK)
            real = rows < length
            at = (start + rows)[:, None] * (3 * width) + head * DIM + lane[None, :]
            query = tl.load(qkv + at, mask=real[:, None], other=0.0)
            at_out = (start + rows)[:, None] * width + head * DIM + lane[None, :]
            mixed = tl.load(out + at_out, mask=real[:, None], other=0.0)
            grad = tl.load(grad_out + at_out, mask=real[:, None], other=0.0)
            mean = tl.sum(mixed.to(tl.float32) * grad.to(tl.float32), 1)  # what softmax takes off each row
            norm = tl.load(lse + head * tokens + start + rows, mask=real, other=0.0)
            both = real[:, None] & there[None, :]
            distance = rows[:, None] - keys[None, :] + (REACH - 1)
            if EXACT:
                score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # (queries, keys)
                grad_weight = tl.dot(grad, tl.trans(value), input_precision="ieee")
            else:
                score = tl.dot(query, tl.trans(key)) * scale
                grad_weight = tl.dot(grad, tl.trans(value))
            if REACH:
                score += tl.load(bias + head * (2 * REACH - 1) + distance, mask=both, other=0.0)
            weight = tl.where(both, tl.exp(score - norm[:, None]), 0.0)
            kept = weight * keep_scale
            grad_weight = grad_weight * keep_scale
            if DROPOUT:
                keep = keep_mask(seed, head * tokens + start + rows, keys, threshold)
                kept = tl.where(keep, kept, 0.0)
                grad_weight = tl.where(keep, grad_weight, 0.0)
            grad_score = weight * (grad_weight - mean[:, None])
            if REACH:
                if SHORT:  # all layers' scores together; distances are looked up once for all of them
                    square = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
                    square = grad_bias + (block * HEADS + head).to(tl.int64) * (BLOCK * BLOCK) + square
                    tl.store(square, grad_score + tl.load(square))
                else:
                    bucket_sums += _by_bucket(grad_score, buckets, offset - first, BLOCK, REACH, BUCKETS)
            if EXACT:
                grad_value += tl.dot(tl.trans(kept), grad, input_precision="ieee")
                grad_key += tl.dot(tl.trans(grad_score), query, input_precision="ieee")
                if SHORT:
                    grad_query = tl.dot(grad_score, key, input_precision="ieee") * scale
            else:
                low = grad_score.to(query.dtype)
                grad_value += tl.dot(tl.trans(kept.to(grad.dtype)), grad)
                grad_key += tl.dot(tl.trans(low), query)
                if SHORT:
                    grad_query = tl.dot(low, key) * scale
            if SHORT:
                tl.store(grad_qkv + at, grad_query, mask=real[:, None])
        tl.store(grad_qkv + at_keys + width, grad_key * scale, mask=there[:, None])
        tl.store(grad_qkv + at_keys + 2 * width, grad_value, mask=there[:, None])
    if REACH and not SHORT:
        at = grad_bias + (block * HEADS + head) * BUCKETS + tl.arange(0, BUCKETS)
        tl.store(at, bucket_sums + tl.load(at))


@triton.jit(do_not_specialize=["site"])
def _attention_backward_queries(
    qkv, out, lse, grad_out, grad_qkv, blocks, bias, seeds, site, scale, tokens, threshold, keep_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, REACH: tl.constexpr,
    DROPOUT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of queries, where sequences have several blocks."""
    block, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(blocks + 3 * block).to(tl.int64)
    length = tl.load(blocks + 3 * block + 1)
    first = tl.load(blocks + 3 * block + 2)
    if first >= length:
        return
    width: tl.constexpr = HEADS * DIM
    lane = tl.arange(0, DIM)
    rows = first + tl.arange(0, BLOCK)
    real = rows < length
    at_rows = (start + rows)[:, None] * (3 * width) + head * DIM + lane[None, :]
    query = tl.load(qkv + at_rows, mask=real[:, None], other=0.0)
    at_out = (start + rows)[:, None] * width + head * DIM + lane[None, :]
    mixed = tl.load(out + at_out, mask=real[:, None], other=0.0)
    grad = tl.load(grad_out + at_out, mask=real[:, None], other=0.0)
    mean = tl.sum(mixed.to(tl.float32) * grad.to(tl.float32), 1)
    norm = tl.load(lse + head * tokens + start + rows, mask=real, other=0.0)
    seed = tl.load(seeds + site)
    grad_query = tl.zeros([BLOCK, DIM], tl.float32)
    for offset in range(0, length, BLOCK):
        keys = offset + tl.arange(0, BLOCK)
        there = keys < length
        at = (start + keys)[:, None] * (3 * width) + head * DIM + lane[None, :]
        key = tl.load(qkv + at + width, mask=there[:, None], other=0.0)
        value = tl.load(qkv + at + 2 * width, mask=there[:, None], other=0.0)
        both = real[:, None] & there[None, :]
        if EXACT:
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            grad_weight = tl.dot(grad, tl.trans(value), input_precision="ieee") * keep_scale
        else:
            score = tl.dot(query, tl.trans(key)) * scale
            grad_weight = tl.dot(grad, tl.trans(value)) * keep_scale
        if REACH:
            distance = rows[:, None] - keys[None, :] + (REACH - 1)
            score += tl.load(bias + head * (2 * REACH - 1) + distance, mask=both, other=0.0)
        weight = tl.where(both, tl.exp(score - norm[:, None]), 0.0)
        if DROPOUT:
            keep = keep_mask(seed, head * tokens + start + rows, keys, threshold)
            grad_weight = tl.where(keep, grad_weight, 0.0)
        grad_score = weight * (grad_weight - mean[:, None])
        if EXACT:
            grad_query += tl.dot(grad_score, key, input_precision="ieee")
        else:
            grad_query += tl.dot(grad_score.to(key.dtype), key)
    tl.store(grad_qkv + at_rows, grad_query * scale, mask=real[:, None])


def attention(qkv: Tensor, blocks: Blocks, bias: Bias | None, dropout: Dropout, out: Tensor, lse: Tensor) -> Tensor:
    """Every token looks at the tokens of its own sequence.

    Args:
        qkv: queries, keys and values side by side, (tokens, 3 * width).
        out: gets what was found, (tokens, width).
        lse: gets the logarithm of each softmax's sum, (heads, tokens).
    """
    heads, (tokens, width) = len(lse), out.shape
    _attention_forward[(len(blocks.table), heads)](
        qkv, out, lse, blocks.table, out if bias is None else bias.by_distance, dropout.seeds, dropout.site,
        1 / math.sqrt(width // heads), tokens, dropout.threshold, dropout.scale, HEADS=heads, DIM=width // heads,
        BLOCK=blocks.size, REACH=0 if bias is None else bias.reach, DROPOUT=dropout.rate > 0, EXACT=exact(qkv),
        num_warps=(WARPS if bias is None else WARPS_WITH_BIAS)[blocks.size],
    )  # fmt: skip
    return out


def bias_shares(bias: Bias | None, heads: int, blocks: Blocks) -> Tensor | None:
    """Where the programs of all layers' backward passes add their shares of the table's gradient, (blocks, heads, ...):
    by query and key where sequences have one block, else by bucket.
    """
    if bias is None:
        return None
    last = (blocks.size, blocks.size) if blocks.short else (triton.next_power_of_2(bias.rows),)
    return torch.zeros((len(blocks.table), heads, *last), device=bias.buckets.device, dtype=torch.float32)


def bias_gradient(shares: Tensor, bias: Bias) -> Tensor:
    """The gradient of the learned table, (rows, heads)."""
    total = shares.sum(0)  # (heads, ...)
    if shares.dim() == 3:
        return total[:, : bias.rows].t().contiguous()
    size = shares.shape[-1]
    place = torch.arange(size, device=shares.device)
    bucket = bias.buckets[place[:, None] - place[None, :] + bias.reach - 1].view(1, -1)  # (1, size * size)
    chosen = bucket == torch.arange(bias.rows, device=shares.device)[:, None]
    return chosen.float() @ total.view(len(total), -1).t()


def attention_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, blocks: Blocks, bias: Bias | None, shares: Tensor | None,
    dropout: Dropout, grad_qkv: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of qkv; into `shares` goes that of the relative bias."""
    heads, (tokens, width) = len(lse), out.shape
    settings = {
        "HEADS": heads, "DIM": width // heads, "BLOCK": blocks.size, "REACH": 0 if bias is None else bias.reach,
        "DROPOUT": dropout.rate > 0, "EXACT": exact(qkv), "num_warps": (WARPS if bias is None else WARPS_BACK_WITH_BIAS)[blocks.size],
    }  # fmt: skip
    numbers = (1 / math.sqrt(width // heads), tokens, dropout.threshold, dropout.scale)
    by_distance, buckets = (out, out) if bias is None else (bias.by_distance, bias.buckets)
    grid = (len(blocks.table), heads)
    _attention_backward[grid](
        qkv, out, lse, grad, grad_qkv, blocks.table, by_distance, buckets, lse if shares is None else shares,
        dropout.seeds, dropout.site, *numbers, BUCKETS=1 if shares is None or blocks.short else shares.shape[2], SHORT=blocks.short,
        **settings,
    )  # fmt: skip
    if not blocks.short:
        _attention_backward_queries[grid](
            qkv, out, lse, grad, grad_qkv, blocks.table, by_distance, dropout.seeds, dropout.site, *numbers, **settings
        )
    return grad_qkv


def exact(x: Tensor) -> bool:
    """Are products of float32 to be computed in full, not in tf32?"""
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
