"""Triton kernels of the packed encoder: dropout, LayerNorm, embeddings and activations, the passes between the
products (attention is in `attention_kernels.py`).

Each kernel is a `@triton.jit` function, with a plain function after them that allocates and launches. `fused.py` makes
layers of them. Sequences lie end to end, so a token is a row, and nothing here knows of padding.

Two rules hold everywhere. Dropout is part of the kernel: a mask is never stored, but drawn again in the backward pass
from the same seed (`keep_mask`). And no result depends on the order in which programs run: sums go through a table of
partial sums or a sorted list instead of atomic additions, so that the same step gives the same bits.

They also run in Triton's interpreter on a CPU (TRITON_INTERPRET=1), which is how the tests without a GPU check them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # that share the rows of a matrix where columns are summed: four for each multiprocessor of a large GPU
ROWS_BACK = 2  # that a program holds at once on the way back through a norm: what was fastest
KINDS = {"gelu": "gelu", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "relu": "relu", "silu": "silu"}


@dataclass(frozen=True)
class Dropout:
    """How much of a place's values is dropped, and where its random numbers come from."""

    rate: float
    seeds: Tensor
    """(places,) one number for each place of the network, drawn anew in every step."""
    site: int
    """Which of the places."""

    @property
    def threshold(self) -> int:
        return round(self.rate * 2**32)

    @property
    def scale(self) -> float:
        return 1 / (1 - self.threshold / 2**32)


@triton.jit
def _mix(x):
    """A 32-bit integer well scrambled (lowbias32, Ettinger's search of integer hashes)."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keep_mask(seed, rows, columns, threshold):
    """Which elements dropout keeps, (rows, columns): a hash of the seed and the place, against p * 2^32."""
    row = _mix(rows.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32))
    column = columns.to(tl.uint32) * 0x85EBCA77
    return _mix(row[:, None] ^ column[None, :]) >= threshold.to(tl.uint32)


@triton.jit(do_not_specialize=["site"])
def _norm_forward(
    x, residual, gamma, beta, out, summed, moments, seeds, site, eps, rows_in_all, threshold, keep_scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """LayerNorm(residual + dropout(x)); keeps the sum and each row's mean and 1/deviation for the way back."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    inside = columns[None, :] < WIDTH
    real = (rows[:, None] < rows_in_all) & inside
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if DROPOUT:
        keep = keep_mask(tl.load(seeds + site), rows, columns, threshold)
        value = tl.where(keep, value * keep_scale, 0.0)
    value += tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1) / WIDTH
    centred = tl.where(inside, value - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    result = centred * scale[:, None] * tl.load(gamma + columns, mask=columns < WIDTH, other=0.0)[None, :]
    result += tl.load(beta + columns, mask=columns < WIDTH, other=0.0)[None, :]
    tl.store(out + at, result, mask=real)
    tl.store(summed + at, value, mask=real)
    tl.store(moments + 2 * rows, mean, mask=rows < rows_in_all)
    tl.store(moments + 2 * rows + 1, scale, mask=rows < rows_in_all)


@triton.jit(do_not_specialize=["site", "column"])
def _norm_backward(
    grad_out, summed, moments, gamma, grad_sum, grad_x, sums, sums_width, column, seeds, site, rows_in_all, threshold,
    keep_scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Gradients of the sum and of what was dropped out of it, and this program's share of those of gamma, beta and
    the bias that was added to x before. With AFTER, dropout came after the norm, as it does in the embeddings.
    """
    program = tl.program_id(0)
    columns = tl.arange(0, PADDED)
    inside = columns < WIDTH
    weight = tl.load(gamma + columns, mask=inside, other=0.0)
    for_gamma = tl.zeros([ROWS, PADDED], tl.float32)
    for_beta = tl.zeros([ROWS, PADDED], tl.float32)
    for_bias = tl.zeros([ROWS, PADDED], tl.float32)
    seed = tl.load(seeds + site)
    for first in range(program * ROWS, rows_in_all, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        real = (rows[:, None] < rows_in_all) & inside[None, :]
        at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        grad = tl.load(grad_out + at, mask=real, other=0.0).to(tl.float32)
        if DROPOUT:
            keep = keep_mask(seed, rows, columns, threshold)
            if AFTER:
                grad = tl.where(keep, grad * keep_scale, 0.0)
        mean = tl.load(moments + 2 * rows, mask=rows < rows_in_all, other=0.0)
        scale = tl.load(moments + 2 * rows + 1, mask=rows < rows_in_all, other=0.0)
        value = tl.load(summed + at, mask=real, other=0.0).to(tl.float32)
        normal = tl.where(real, (value - mean[:, None]) * scale[:, None], 0.0)
        weighted = grad * weight[None, :]
        along = tl.sum(weighted * normal, 1) / WIDTH
        level = tl.sum(weighted, 1) / WIDTH
        back = (weighted - normal * along[:, None] - level[:, None]) * scale[:, None]
        tl.store(grad_sum + at, back, mask=real)
        for_gamma += grad * normal
        for_beta += grad
        if not AFTER:
            if DROPOUT:
                back = tl.where(keep, back * keep_scale, 0.0)
            tl.store(grad_x + at, back, mask=real)
            for_bias += tl.where(real, back, 0.0)
    at = sums + program * sums_width + column + columns
    tl.store(at, tl.sum(for_gamma, 0), mask=inside)
    tl.store(at + WIDTH, tl.sum(for_beta, 0), mask=inside)
    if not AFTER:
        tl.store(at + 2 * WIDTH, tl.sum(for_bias, 0), mask=inside)


@triton.jit(do_not_specialize=["first", "count"])
def _add_shares(shares, out, width, first, count, rows_in_all, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[c] = the sum of column first + c of the shares."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < count
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows_in_all, ROWS):
        rows = start + tl.arange(0, ROWS)
        real = (rows[:, None] < rows_in_all) & inside[None, :]
        total += tl.load(shares + rows[:, None] * width + first + columns[None, :], mask=real, other=0.0)
    tl.store(out + columns, tl.sum(total, 0), mask=inside)


@triton.jit(do_not_specialize=["site"])
def _embed_forward(
    ids, positions, segments, token_table, position_table, segment_table, gamma, beta, out, summed, moments, seeds,
    site, eps, rows_in_all, threshold, keep_scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """dropout(LayerNorm(token + position + segment))."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    inside = columns[None, :] < WIDTH
    there = rows < rows_in_all
    real = there[:, None] & inside
    token = tl.load(ids + rows, mask=there, other=0).to(tl.int64)
    place = tl.load(positions + rows, mask=there, other=0).to(tl.int64)
    value = tl.load(token_table + token[:, None] * WIDTH + columns[None, :], mask=real, other=0.0).to(tl.float32)
    value += tl.load(position_table + place[:, None] * WIDTH + columns[None, :], mask=real, other=0.0)
    if SEGMENTS:
        part = tl.load(segments + rows, mask=there, other=0).to(tl.int64)
        value += tl.load(segment_table + part[:, None] * WIDTH + columns[None, :], mask=real, other=0.0)
    mean = tl.sum(value, 1) / WIDTH
    centred = tl.where(inside, value - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    result = centred * scale[:, None] * tl.load(gamma + columns, mask=columns < WIDTH, other=0.0)[None, :]
    result += tl.load(beta + columns, mask=columns < WIDTH, other=0.0)[None, :]
    if DROPOUT:
        keep = keep_mask(tl.load(seeds + site), rows, columns, threshold)
        result = tl.where(keep, result * keep_scale, 0.0)
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(out + at, result, mask=real)
    tl.store(summed + at, value, mask=real)
    tl.store(moments + 2 * rows, mean, mask=there)
    tl.store(moments + 2 * rows + 1, scale, mask=there)


@triton.jit
def _scatter_rows(sorted_keys, order, rows, table, rows_in_all, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """table[key] = sum of the rows with that key. The first of each run of equal keys does the work of all."""
    place = tl.program_id(0)
    key = tl.load(sorted_keys + place).to(tl.int64)
    before = tl.load(sorted_keys + place - 1, mask=place > 0, other=-1).to(tl.int64)
    if key == before:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    more = 1
    while more > 0:
        places = place + tl.arange(0, 16)
        mine = tl.load(sorted_keys + places, mask=places < rows_in_all, other=-1).to(tl.int64) == key
        index = tl.load(order + places, mask=mine, other=0).to(tl.int64)
        at = index[:, None] * WIDTH + columns[None, :]
        total += tl.sum(tl.load(rows + at, mask=mine[:, None] & inside[None, :], other=0.0).to(tl.float32), 0)
        more = (tl.sum(mine.to(tl.int32), 0) == 16).to(tl.int32)
        place += 16
    tl.store(table + key * WIDTH + columns, total, mask=inside)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if KIND == "tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(2 * inner)
    if KIND == "silu":
        return x * tl.sigmoid(x)
    return tl.maximum(x, 0.0)


@triton.jit
def _activation_forward(x, out, size, KIND: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, _activate(value, KIND), mask=at < size)


@triton.jit
def _activation_backward(grad, x, out, size, KIND: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    above = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, above * _slope(value, KIND), mask=at < size)


@triton.jit
def _slope(x, KIND: tl.constexpr):
    if KIND == "gelu":
        return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if KIND == "tanh":
        gate = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        return gate + x * gate * (1 - gate) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    if KIND == "silu":
        gate = tl.sigmoid(x)
        return gate * (1 + x * (1 - gate))
    return tl.where(x > 0, 1.0, 0.0)


@dataclass
class ColumnSums:
    """Sums over all rows of several matrices: each program writes its share, and one pass adds the shares at the end."""

    shares: Tensor
    """(programs, columns) float32."""
    used: int = 0
    added: int = 0

    @classmethod
    def of(cls, columns: int, rows: int, device: torch.device) -> ColumnSums:
        """For matrices of so many rows; a program has at least four of them."""
        programs = min(PROGRAMS, triton.cdiv(rows, 4))
        return cls(torch.empty((programs, columns), device=device, dtype=torch.float32))

    def take(self, columns: int) -> int:
        """The first of so many columns that are now the caller's."""
        self.used += columns
        return self.used - columns

    def add(self) -> Tensor:
        """The sums of the columns that were taken since the last time."""
        first, self.added = self.added, self.used
        rows, width = self.shares.shape
        found = torch.empty(self.used - first, device=self.shares.device)
        _add_shares[(triton.cdiv(len(found), 32),)](
            self.shares, found, width, first, len(found), rows, ROWS=128, COLUMNS=32, num_warps=8
        )
        return found


def norm(
    x: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, eps: float, dropout: Dropout,
    out: Tensor, summed: Tensor, moments: Tensor,
) -> Tensor:  # fmt: skip
    """LayerNorm(residual + dropout(x)) into `out`, the sum, and each row's moments, (rows, 2); x is (rows, width)."""
    rows, width = x.shape
    padded, height, warps = _tile(width)
    _norm_forward[(triton.cdiv(rows, height),)](
        x, residual, gamma, beta, out, summed, moments, dropout.seeds, dropout.site, eps, rows, dropout.threshold,
        dropout.scale, WIDTH=width, PADDED=padded, ROWS=height, DROPOUT=dropout.rate > 0, num_warps=warps,
    )  # fmt: skip
    return out


def norm_backward(
    grad: Tensor, summed: Tensor, moments: Tensor, gamma: Tensor, dropout: Dropout, sums: ColumnSums,
    grad_x: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient of the sum (and so of the residual), and that of x into `grad_x`; there is none if dropout came after
    the norm. Into `sums` go those of gamma, of beta and, unless dropout came after, of the bias within x.
    """
    rows, width = grad.shape
    after = grad_x is None
    grad_sum = torch.empty_like(grad)  # of its own: to the sum others will be added
    padded, height, warps = _tile(width, back=True)
    column = sums.take((2 if after else 3) * width)
    _norm_backward[(len(sums.shares),)](
        grad, summed, moments, gamma, grad_sum, grad_sum if grad_x is None else grad_x, sums.shares,
        sums.shares.shape[1], column, dropout.seeds,
        dropout.site, rows, dropout.threshold, dropout.scale, WIDTH=width, PADDED=padded, ROWS=height,
        DROPOUT=dropout.rate > 0, AFTER=after, num_warps=warps,
    )  # fmt: skip
    return grad_sum


def embed(
    ids: Tensor, positions: Tensor, segments: Tensor, tables: tuple[Tensor, Tensor, Tensor | None],
    gamma: Tensor, beta: Tensor, eps: float, dropout: Dropout, out: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dropout(LayerNorm(token + position + segment)) into `out`; the sum, and each row's moments."""
    rows, width = out.shape
    summed = torch.empty_like(out)
    moments = torch.empty((rows, 2), device=ids.device, dtype=torch.float32)
    padded, height, warps = _tile(width)
    _embed_forward[(triton.cdiv(rows, height),)](
        ids, positions, segments, *(gamma if table is None else table for table in tables), gamma, beta, out, summed,
        moments, dropout.seeds, dropout.site, eps, rows, dropout.threshold, dropout.scale, WIDTH=width, PADDED=padded,
        ROWS=height, SEGMENTS=tables[2] is not None, DROPOUT=dropout.rate > 0, num_warps=warps,
    )  # fmt: skip
    return summed, moments


def scatter_rows(rows: Tensor, sorted_keys: Tensor, order: Tensor, table: Tensor) -> Tensor:
    """Into row k of a table of zeros goes the sum of the rows with key k; the keys as `torch.sort` gives them."""
    count, width = rows.shape
    columns = min(128, triton.next_power_of_2(width))
    _scatter_rows[(count, triton.cdiv(width, columns))](
        sorted_keys, order, rows, table, count, WIDTH=width, COLUMNS=columns, num_warps=1
    )
    return table


def activation(x: Tensor, kind: str, out: Tensor) -> Tensor:
    _activation_forward[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), KIND=KINDS[kind], COUNT=1024)
    return out


def activation_backward(grad: Tensor, x: Tensor, kind: str, out: Tensor) -> Tensor:
    """The gradient before an activation."""
    _activation_backward[(triton.cdiv(x.numel(), 1024),)](grad, x, out, x.numel(), KIND=KINDS[kind], COUNT=1024)
    return out


def _tile(width: int, *, back: bool = False) -> tuple[int, int, int]:
    """A row's width as a power of two, how many rows a program holds at once, and its warps: what was fastest."""
    padded = triton.next_power_of_2(width)
    if back:
        return padded, ROWS_BACK, max(1, padded // 256)
    return padded, max(1, 2048 // padded), 2 if padded >= 1024 else 4
