"""Steps as CUDA graphs: a whole step is recorded once for each layout of batch, and from then on is one launch.

    staging, graphs = Staging(config, rates=4), Graphs(step)
    staged = staging.stage(batch)             # on another thread: everything the step reads, in one pinned block
    graphs.run(staged, rates)                 # copy the block, replay

A recorded step reads always the same memory and works on always the same shapes, so a batch is laid out in a block of
a fixed size, rounded up from its own: what is left of its tokens is filled with sequences of padding that nobody reads, what is left of its
rows with rows that have no label. The rounding is at most a sixteenth of the tokens, half of that on average.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minbert.data.inputs import Batch
from minbert.model.encoder import EncoderConfig
from minbert.model.multitask import Ready, ReadyPart
from minbert.model.packed import BLOCK, SHORTEST, Packed, block_size, block_table, positions
from minbert.training.step import TrainStep

LEAST = 256  # tokens of the smallest layout
SLOTS = 6  # pinned blocks for each batch of a step: one in use, the others being filled or waiting
MOST = 400  # recorded layouts; further ones run unrecorded
Item = TypeVar("Item")
Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Layout:
    """The sizes of a batch of fixed shapes, and where each array lies in its block of 32-bit numbers."""

    tokens: int
    sequences: int
    block: int
    short: bool
    parts: tuple[tuple[str, int, int], ...]
    """(task, views, rows) of each part."""
    rates: int
    """Learning rates."""
    weighted: bool = False
    """The tokens have weights."""

    @property
    def blocks(self) -> int:
        return self.sequences + (0 if self.short else self.tokens // BLOCK)

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """From where to where each array goes; each begins at a multiple of 16 bytes."""
        sizes = {
            "ids": self.tokens,
            "positions": self.tokens,
            "segments": self.tokens,
            "offsets": self.sequences + 1,
            "blocks": 3 * self.blocks,
            "rates": self.rates,
            "weights": self.tokens if self.weighted else 0,
        }
        for task, views, rows in self.parts:
            sizes[f"index {task}"] = views * rows
            sizes[f"labels {task}"] = rows
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = (at, at + size)
            at += -(-size // 4) * 4
        return found

    @property
    def size(self) -> int:
        return max(end for _, end in self.places.values())

    def batch(self, block: Tensor) -> Ready:
        """A block on the device as the arrays that it holds."""

        def part(name: str) -> Tensor:
            start, end = self.places[name]
            return block[start:end]

        packed = Packed(
            part("ids"),
            part("positions"),
            part("segments"),
            part("offsets"),
            part("blocks").view(-1, 3),
            self.block,
            self.short,
            weights=part("weights").view(torch.float32) if self.weighted else None,
        )
        parts = [
            ReadyPart(task, part(f"index {task}").view(views, rows), part(f"labels {task}").view(torch.float32))
            for task, views, rows in self.parts
        ]
        return Ready(packed, tuple(parts))

    def rate_tensor(self, block: Tensor) -> Tensor:
        start, end = self.places["rates"]
        return block[start:end].view(torch.float32)


def layout_of(batch: Batch, rates: int) -> Layout:
    """The smallest layout that holds the batch."""
    tokens = rounded(int(batch.tokens.offsets[-1]))
    # Tokens to guess are rounded up to a sixteenth of the tokens: at the usual rate, nearly all batches of a size agree.
    parts = tuple(
        (part.task, part.index.shape[0], _up(part.rows, 8 if part.texts is None else tokens // 16))
        for part in batch.parts
    )
    longest = int(batch.tokens.offsets[-1] - batch.tokens.offsets[-2])  # they are sorted
    block = block_size(longest)
    filled = -(
        -(tokens if tokens == LEAST else step_of(tokens)) // SHORTEST
    )  # sequences of padding at the end, at most
    texts = [_up(part.rows if part.texts is None else part.texts, 8) for part in batch.parts]
    sequences = sum(views * count for (_, views, _), count in zip(parts, texts, strict=True)) + filled
    weighted = batch.tokens.weights is not None
    return Layout(tokens, sequences, block, longest <= BLOCK, parts, rates, weighted)


def _up(count: int, step: int) -> int:
    """To a multiple, at least one."""
    return max(1, -(-count // step)) * step


def step_of(tokens: int) -> int:
    """How far apart the layouts' sizes lie: a sixteenth of the next lower power of two."""
    return max(LEAST // 16, 1 << max(0, tokens.bit_length() - 5))


def rounded(tokens: int) -> int:
    tokens = max(tokens, LEAST)
    step = step_of(tokens)
    return -(-tokens // step) * step


def lay_out(batch: Batch, layout: Layout, config: EncoderConfig, block: NDArray[np.int32]) -> None:
    """Write the batch into a block."""
    tokens = batch.tokens
    used = int(tokens.offsets[-1])
    rest = layout.tokens - used
    tail = np.append(np.arange(0, rest, SHORTEST), rest)  # the rest, in short sequences: every encoder can take those
    offsets = np.concatenate([tokens.offsets, used + tail[1:]]) if rest else tokens.offsets

    def put(name: str, values: NDArray[np.generic], fill: int = 0) -> None:
        start, end = layout.places[name]
        block[start : start + values.size] = values.reshape(-1)
        block[start + values.size : end] = fill

    put("ids", tokens.ids, config.pad_id)
    put("positions", positions(offsets, config.first_position))
    put("segments", tokens.segments)
    put("offsets", offsets, layout.tokens)
    put("blocks", block_table(offsets[:-1], np.diff(offsets)))
    if tokens.weights is not None:
        start, end = layout.places["weights"]
        weights = block[start:end].view(np.float32)
        weights[:used], weights[used:] = tokens.weights, 1
    for part, (_, _, rows) in zip(batch.parts, layout.parts, strict=True):
        # Rows that are not there point at the first sequence, or the first token.
        put(f"index {part.task}", np.pad(part.index, ((0, 0), (0, rows - part.rows))))
        start, end = layout.places[f"labels {part.task}"]
        labels = block[start:end].view(np.float32)
        labels[: part.rows], labels[part.rows :] = part.labels, np.nan


@dataclass
class Staged:
    """A batch in pinned memory, on its way to the device."""

    layout: Layout
    block: Tensor
    rows: int
    copied: torch.cuda.Event

    def send(self, block: Tensor, rates: list[float]) -> None:
        """Into the layout's memory on the device, with the step's learning rates."""
        start, end = self.layout.places["rates"]
        self.block.numpy()[start:end].view(np.float32)[:] = rates
        block.copy_(self.block, non_blocking=True)
        self.copied.record()


class Recorded:
    """A layout's memory on the device and, after its first batch, its graph."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.block = torch.empty(layout.size, dtype=torch.int32, device=device)
        self.batch, self.rates = layout.batch(self.block), layout.rate_tensor(self.block)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.grads: list[tuple[torch.nn.Parameter, Tensor]] = []
        self.kept: list[Tensor] = []
        """What the graph reads besides."""


class Staging:
    """Pinned blocks, used in turn; each again only when its batch has arrived on the device."""

    def __init__(self, config: EncoderConfig, rates: int, batches: int = 1) -> None:
        """For steps of so many batches."""
        self.config, self.rates = config, rates
        # "blocking": whoever waits for a copy sleeps; else each run of many on a machine keeps a core busy with waiting.
        self.slots: list[tuple[Tensor, torch.cuda.Event]] = [
            (torch.empty(0, dtype=torch.int32), torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
            for _ in range(SLOTS * batches)
        ]
        self.turn = 0

    def stage(self, batch: Batch) -> Staged:
        layout = layout_of(batch, self.rates)
        block, copied = self.slots[self.turn]
        copied.synchronize()
        if len(block) < layout.size:
            block = torch.empty(2 * layout.size, dtype=torch.int32, pin_memory=True)
            self.slots[self.turn] = (block, copied)
        self.turn = (self.turn + 1) % len(self.slots)
        lay_out(batch, layout, self.config, block.numpy())
        return Staged(layout, block[: layout.size], batch.rows, copied)


class Graphs:
    """Runs steps on the current stream, as graphs where their layout has come up before.

    The first batch of a layout runs as it is (that also compiles its kernels), and then the step is recorded, which
    computes nothing; later batches replay it. So each batch is trained on exactly once.
    """

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.whole = step.optimizer.capturable  # else the update runs by itself after each replay
        self.recorded: dict[Layout, Recorded] = {}
        self.pool: Any = None

    def clear(self) -> None:
        """Forget everything: what learns has changed."""
        self.recorded, self.pool = {}, None

    def run(self, staged: Staged, rates: list[float]) -> None:
        """One batch, and the update after it."""
        entry = self.recorded.get(staged.layout)
        if entry is None:
            entry = self._allocate(staged.layout)
        staged.send(entry.block, rates)
        if entry.graph is None:
            self._work(entry)
            if not self.whole:
                self.step.update()
            if staged.layout in self.recorded:
                self._record(entry)
            return
        entry.graph.replay()
        if not self.whole:
            for parameter, grad in entry.grads:
                parameter.grad = grad
            self.step.update()

    def _allocate(self, layout: Layout) -> Recorded:
        entry = Recorded(layout, self.step.model.device)
        if len(self.recorded) < MOST:
            self.recorded[layout] = entry
        return entry

    def _work(self, entry: Recorded) -> None:
        self.step.gradient(entry.batch)
        if self.whole:
            self.step.optimizer.rates = entry.rates
            self.step.update()
            self.step.optimizer.rates = None

    def _record(self, entry: Recorded) -> None:
        optimizer = self.step.optimizer
        if self.whole:
            optimizer.reserve()
        entry.graph = record(lambda: self._work(entry), self.pool)
        if self.whole:
            entry.kept = optimizer.settle()
        self.pool = entry.graph.pool()
        if not self.whole:
            entry.grads = [(value, value.grad) for value in self.step.parameters() if value.grad is not None]
            optimizer.zero_grad(set_to_none=True)


def record(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """What some work launches on the current stream, as a graph; nothing of it is computed.

    It has run before, outside of a graph; the memory that it took there goes back to the device.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # "thread_local": the thread that stages batches may go on with its own calls meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    torch.cuda.empty_cache()
    return graph


def ahead(items: Iterable[Item], prepare: Callable[[Item], Prepared], depth: int) -> Iterator[Prepared]:
    """The prepared items, made on another thread, at most `depth` of them ahead of whoever takes them."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
    stop = threading.Event()

    def put(message: tuple[str, Any]) -> bool:
        while not stop.is_set():
            try:
                ready.put(message, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(("item", prepare(item))):
                    return
            put(("end", None))
        except BaseException as error:  # whatever it is, the taker shall see it
            put(("error", error))

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        stop.set()
        thread.join()
