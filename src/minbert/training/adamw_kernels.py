"""AdamW for all parameters of a model in three Triton launches: the gradients' norm, the step counts, the update.

A table in device memory holds the addresses of every parameter's tensors, so one launch serves hundreds of them, and
the clipping, the learning rates and the step counts never come to the host. The update also writes the low-precision
copies that the encoder's products run on (`model/fused.py`), instead of a pass of its own before the next step.

The formula is that of `optimizers.AdamW` with torch's bias correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024  # elements that a program updates: four for each thread, one read of 16 bytes
COLUMNS = 8  # of the table: addresses of parameter, gradient, both moments, copy and step count; size; group
LOW = {torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Row:
    """One parameter's tensors."""

    group: int
    parameter: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    step: Tensor
    low: Tensor | None


@triton.jit
def _address(place, ALIGNED: tl.constexpr):
    """The float32 numbers whose address is stored in a place of the table."""
    address = tl.load(place).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        address = tl.multiple_of(address, 16)  # so that four numbers are read at once
    return address


@triton.jit
def _squares(table, chunks, shares, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """The sum of squares of one piece of a gradient."""
    program = tl.program_id(0)
    row = table + tl.load(chunks + 2 * program).to(tl.int64) * COLUMNS
    grad = _address(row + 1, ALIGNED)
    at = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(grad + at, mask=at < tl.load(row + 6), other=0.0)
    tl.store(shares + program, tl.sum(value * value, 0))


@triton.jit
def _prepare(
    table, shares, found, corrections, loss_scale, tensors, programs, clip,
    LOG1: tl.constexpr, LOG2: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """What gradients are divided by, and whether they are useless, into `found`; then each parameter's step count and
    bias corrections.
    """
    total = tl.zeros([1024], tl.float32)
    for first in range(0, programs, 1024):
        at = first + tl.arange(0, 1024)
        total += tl.load(shares + at, mask=at < programs, other=0.0)
    scale = 1.0
    if SCALED:
        scale = tl.load(loss_scale)
    norm = tl.sqrt(tl.sum(total, 0)) / scale
    bad = 0.0
    if SCALED:
        bad = tl.where(norm < float("inf"), 0.0, 1.0)  # not a number is not less either
    excess = tl.where(clip > 0, tl.maximum((norm + 1e-6) / clip, 1.0), 1.0)
    tl.store(found, scale * excess)
    tl.store(found + 1, bad)
    for first in range(0, tensors, 256):
        rows = first + tl.arange(0, 256)
        there = rows < tensors
        count = tl.load(table + rows * COLUMNS + 5, mask=there, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(count, mask=there, other=0.0) + 1.0 - bad
        tl.store(count, step, mask=there)
        # In float64: at the first steps 1 - beta^step is a small difference of two numbers near 1.
        step = step.to(tl.float64)
        tl.store(corrections + 2 * rows, (1 - tl.exp(step * LOG1)).to(tl.float32), mask=there)
        tl.store(corrections + 2 * rows + 1, tl.sqrt(1 - tl.exp(step * LOG2)).to(tl.float32), mask=there)


@triton.jit
def _update(
    table, chunks, found, corrections, rates, decays, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, LOW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One piece of a parameter."""
    if tl.load(found + 1) != 0.0:
        return
    program = tl.program_id(0)
    number = tl.load(chunks + 2 * program).to(tl.int64)
    row = table + number * COLUMNS
    at = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    there = at < tl.load(row + 6)
    parameter = _address(row, ALIGNED)
    first = _address(row + 2, ALIGNED)
    second = _address(row + 3, ALIGNED)
    group = tl.load(row + 7)
    rate = tl.load(rates + group)
    correct_first = tl.load(corrections + 2 * number)
    correct_second = tl.load(corrections + 2 * number + 1)
    grad = tl.load(_address(row + 1, ALIGNED) + at, mask=there, other=0.0) / tl.load(found)
    value = tl.load(parameter + at, mask=there, other=0.0) * (1 - rate * tl.load(decays + group))
    mean = tl.load(first + at, mask=there, other=0.0)
    mean += (grad - mean) * (1 - BETA1)
    square = tl.load(second + at, mask=there, other=0.0) * BETA2 + grad * grad * (1 - BETA2)
    value -= rate / correct_first * mean / (tl.sqrt(square) / correct_second + EPS)
    tl.store(parameter + at, value, mask=there)
    tl.store(first + at, mean, mask=there)
    tl.store(second + at, square, mask=there)
    if LOW:
        copy = tl.load(row + 4)
        if copy != 0:
            if LOW == 1:
                tl.store(copy.to(tl.pointer_type(tl.bfloat16)) + at, value.to(tl.bfloat16), mask=there)
            else:
                tl.store(copy.to(tl.pointer_type(tl.float16)) + at, value.to(tl.float16), mask=there)


class Tables:
    """Tables of addresses on the device, made once for each set of tensors.

    While a CUDA graph is recorded nothing can be copied from the host, so a table that is needed then is taken out of
    those that `reserve` made before, and filled by `settle` when the recording is over.
    """

    def __init__(self) -> None:
        self.tables: dict[tuple[int, ...], Tensor] = {}
        self.chunks: dict[tuple[int, ...], Tensor] = {}
        self.spare: Tensor | None = None
        self.unfilled: list[tuple[Tensor, Tensor]] = []

    def reserve(self, tensors: int, device: torch.device) -> None:
        self.spare = torch.zeros((tensors, COLUMNS), dtype=torch.int64, device=device)

    def settle(self) -> list[Tensor]:
        """Fill what a recording took, and hand it over: it must live as long as the graph that reads it."""
        for table, content in self.unfilled:
            table[: len(content)].copy_(content)
        filled = [table for table, _ in self.unfilled]
        self.unfilled, self.spare = [], None
        return filled

    def table(self, rows: Sequence[Row]) -> Tensor:
        key = tuple(pointer for row in rows for pointer in (row.parameter.data_ptr(), row.grad.data_ptr()))
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if key in self.tables and not capturing:
            return self.tables[key]
        content = torch.tensor(
            [
                [
                    *(x.data_ptr() for x in (row.parameter, row.grad, row.first, row.second)),
                    0 if row.low is None else row.low.data_ptr(), row.step.data_ptr(), row.parameter.numel(), row.group,
                ]
                for row in rows
            ]
        )  # fmt: skip
        if capturing:
            if self.spare is None:
                raise RuntimeError("no table was reserved for a recording")
            self.unfilled.append((self.spare, content))
            return self.spare
        if len(self.tables) > 64:  # gradients that are somewhere else in every step
            self.tables = {}
        self.tables[key] = content.to(rows[0].parameter.device)
        return self.tables[key]

    def pieces(self, rows: Sequence[Row]) -> Tensor:
        """(pieces, 2): which row, and the number of the piece in it."""
        sizes = tuple(row.parameter.numel() for row in rows)
        if sizes not in self.chunks:
            counts = -(-np.array(sizes) // CHUNK)
            owner = np.repeat(np.arange(len(sizes)), counts)
            number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
            content = torch.from_numpy(np.stack([owner, number], axis=1).astype(np.int32))
            self.chunks[sizes] = content.to(rows[0].parameter.device)
        return self.chunks[sizes]


def update(
    rows: Sequence[Row], tables: Tables, rates: Tensor, decays: Tensor, betas: tuple[float, float], eps: float,
    clip: float, loss_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """Move all parameters. Returns two numbers on the device: what gradients were divided by, and 1 if nothing moved
    because they had overflowed.
    """
    table, chunks = tables.table(rows), tables.pieces(rows)
    device = rows[0].parameter.device
    tensors = [x for row in rows for x in (row.parameter, row.grad, row.first, row.second)]
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    found = torch.empty(2, device=device)
    shares = torch.empty(len(chunks), device=device)
    if clip or loss_scale is not None:
        _squares[(len(chunks),)](table, chunks, shares, CHUNK=CHUNK, COLUMNS=COLUMNS, ALIGNED=aligned, num_warps=4)
    else:
        shares.zero_()
    corrections = torch.empty((len(rows), 2), device=device)
    beta1, beta2 = betas
    _prepare[(1,)](
        table, shares, found, corrections, found if loss_scale is None else loss_scale, len(rows), len(chunks),
        float(clip), LOG1=math.log(beta1) if beta1 else -math.inf, LOG2=math.log(beta2) if beta2 else -math.inf,
        COLUMNS=COLUMNS, SCALED=loss_scale is not None, num_warps=8,
    )  # fmt: skip
    lows = {LOW[row.low.dtype] for row in rows if row.low is not None}
    _update[(len(chunks),)](
        table, chunks, found, corrections, rates, decays, BETA1=beta1, BETA2=beta2, EPS=eps, CHUNK=CHUNK,
        COLUMNS=COLUMNS, LOW=max(lows, default=0), ALIGNED=aligned, num_warps=8,
        enable_fp_fusion=False,  # to round as torch does; it waits for memory anyway
    )  # fmt: skip
    return found
