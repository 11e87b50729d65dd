"""Gradients of the layers' weights, and of the biases that no norm follows, on the way back through the encoder.

    found = (Together if tokens <= FEW else AtOnce)(given, widths, learns, sums, second)
    after = found.room("down", number)            # the gradient after a weight of a layer goes there
    found.take("down", number, after)
    found.end_layer(number)
    found.finish()
    found.beside.wait()
    found.weights["down", number]

A weight's gradient is a product of what went into it and the gradient of what came out, over the tokens. With many
tokens each is large enough for a GPU, and is computed beside the way back as soon as its factors are there
(`AtOnce`). With few, a product of its own for each would take longer to begin than to compute: they wait until all layers
are done, and there is one product for each kind of weight (`Together`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from minbert.model.kernels import ColumnSums

FEW = 2048  # tokens
BESIDE = 12  # pieces of work that may be under way beside the way back: those of two layers
BIASED = ("qkv", "up")  # the biases of the others are summed up by the norms behind them
Found = TypeVar("Found")


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


class WeightGradients(ABC):
    """What both have in common.

    Args:
        given: what went into the weights, by their names, (layers, tokens, in).
        widths: of what came out of them.
        learns: which layers do.
        sums: where norms leave their shares of column sums.
        second: for work beside the way back.
    """

    def __init__(
        self, given: dict[str, Tensor], widths: dict[str, int], learns: list[bool], sums: ColumnSums,
        second: torch.cuda.Stream | None,
    ) -> None:  # fmt: skip
        self.given, self.widths, self.learns, self.sums = given, widths, learns, sums
        self.beside = Beside(second)
        first = given["qkv"]
        self.ones = torch.ones((8, first.shape[1]), device=first.device, dtype=first.dtype)
        self.weights: dict[tuple[str, int], Tensor] = {}
        self.biases: dict[tuple[str, int], Tensor] = {}
        self.columns: dict[int, Tensor] = {}
        """What norms summed up in a layer."""

    @abstractmethod
    def room(self, name: str, number: int) -> Tensor:
        """For the gradient after a weight of a layer, (tokens, out)."""

    @abstractmethod
    def take(self, name: str, number: int, after: Tensor) -> None:
        """It is there."""

    @abstractmethod
    def end_layer(self, number: int) -> None:
        """All of the layer's are, and nothing will be added to the sums for it any more."""

    @abstractmethod
    def finish(self) -> None:
        """All layers' are. What is found may still be under way, until `beside` has been waited for."""


class AtOnce(WeightGradients):
    """Each as soon as its factors are there."""

    def room(self, name: str, number: int) -> Tensor:
        given = self.given[name][number]
        return given.new_empty((len(given), self.widths[name]))

    def take(self, name: str, number: int, after: Tensor) -> None:
        if not self.learns[number]:
            return
        self.weights[name, number] = self.beside(product, after.t(), self.given[name][number])
        if name in BIASED:
            self.biases[name, number] = self.beside(product, self.ones, after)[0]

    def end_layer(self, number: int) -> None:
        self.columns[number] = self.beside(self.sums.add)

    def finish(self) -> None: ...


class Together(WeightGradients):
    """All layers' in one product for each name, when they are done."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.after = {
            name: given.new_empty((*given.shape[:2], self.widths[name])) for name, given in self.given.items()
        }
        self.ended: list[int] = []

    def room(self, name: str, number: int) -> Tensor:
        return self.after[name][number]

    def take(self, name: str, number: int, after: Tensor) -> None: ...

    def end_layer(self, number: int) -> None:
        self.ended.append(number)

    def finish(self) -> None:
        if self.ended:
            self.columns = dict(zip(self.ended, self.beside(self.sums.add).chunk(len(self.ended)), strict=True))
        if any(self.learns):
            first = self.learns.index(True)
            for name, after in self.after.items():
                self._multiply(name, after[first:], self.given[name][first:], first)

    def _multiply(self, name: str, after: Tensor, given: Tensor, first: int) -> None:
        weights = self.beside(product, after.transpose(1, 2), given)  # (layers, out, in)
        self.weights |= {(name, number): weight for number, weight in enumerate(weights, start=first)}
        if name in BIASED:
            biases = self.beside(product, self.ones.expand(len(after), -1, -1), after)  # (layers, 8, out)
            self.biases |= {(name, number): bias[0] for number, bias in enumerate(biases, start=first)}


def product(left: Tensor, right: Tensor) -> Tensor:
    """Of matrices, or of as many on each side, in float32, whatever the factors are in."""
    if left.dtype == torch.float32 or left.device.type != "cuda":
        return (left @ right).float()
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    return multiply(left, right, out_dtype=torch.float32)
