"""Which task comes next: rows of several tasks to the steps of a training run. Plain numpy, no torch.

    sampler = make_sampler(config, {"sst": lengths, "sts": lengths}, epochs=3, batch_size=32, seed=1)
    for epoch in sampler.epochs():
        for step in epoch:  # a tuple of parts: a task and its rows

A task's rows come from a stream (`streams.py`). A sampler is a class that says in which order the streams' batches are used:

    sequential    ST: one task after another, each for all epochs
    round-robin   RR: within an epoch whole datasets, or one batch of each in turn, in a written order
    proportional  MT-DNN: all batches of all tasks in one random order
    uniform, power, annealed, weighted    each step draws a task
    all           each step has a batch of every task
    mixed         each step has rows of all tasks, shuffled together

Every generator is made from (seed, purpose, task, number of the pass or epoch). So a run is resumed by calling
`epochs()` again and skipping the steps that were done.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from minbert.config import SamplerConfig
from minbert.data.batches import BUCKET
from minbert.data.streams import Budget, Part, Step, Stream
from minbert.errors import MinbertError, suggest

ORDER, THINNING = 2, 11  # what a generator is for: the order among tasks, steps to keep
STEPS: dict[str, Callable[[list[int]], int]] = {"all": sum, "largest": max}  # of an epoch, from the tasks' batches


@dataclass(frozen=True)
class Sampler(ABC):
    """The order in which batches of several tasks are trained on."""

    config: SamplerConfig
    streams: dict[str, Stream]
    planned_epochs: int
    budget: Budget
    seed: int

    def __post_init__(self) -> None:
        if self.config.steps_per_epoch < 0:
            raise MinbertError(f"sampler.steps_per_epoch is {self.config.steps_per_epoch}; expected 0 or more")

    def epochs(self) -> Iterator[Iterator[Step]]:
        """The steps of each epoch, the very same ones at every call.

        An epoch is planned as a whole when it is asked for, so one that is left early does not move the next.
        """
        return (iter(list(steps)) for steps in self._epochs())

    @abstractmethod
    def _epochs(self) -> Iterator[Iterable[Step]]: ...

    @property
    def order(self) -> tuple[str, ...]:
        return self.config.order or tuple(self.streams)

    def _order_rng(self, epoch: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, ORDER, 0, epoch])


class Sequential(Sampler):
    """One task after another for all epochs. An "epoch" is one pass over one task: len(order) * epochs of them."""

    def _epochs(self) -> Iterator[Iterable[Step]]:
        passes = {task: stream.passes() for task, stream in self.streams.items()}
        for task in self.order:
            for batches in islice(passes[task], self.planned_epochs):
                yield zip(batches)  # each batch a step of one part


class RoundRobin(Sampler):
    """Tasks in the written order, by whole datasets or by single batches. A task named twice has two turns."""

    def _epochs(self) -> Iterator[Iterable[Step]]:
        return self._by_batch() if self.config.unit == "batch" else self._by_dataset()

    def _by_dataset(self) -> Iterator[Iterable[Step]]:
        passes = {task: stream.passes() for task, stream in self.streams.items()}
        for _ in range(self.planned_epochs):
            yield zip(chain.from_iterable(next(passes[task]) for task in self.order))

    def _by_batch(self) -> Iterator[Iterable[Step]]:
        """Round after round until the task that needs most of them is through, exactly once; the others cycle.

        Named more than once, that task may have a turn too many in the last round: it lets it go by.
        """
        named = Counter(self.order)
        longest = max(self.order, key=lambda task: math.ceil(self.streams[task].batches / named[task]))
        cycles = {task: stream.cycle() for task, stream in self.streams.items()}
        for batches in islice(self.streams[longest].passes(), self.planned_epochs):
            turns = cycles | {longest: iter(batches)}
            rounds = math.ceil(len(batches) / named[longest])
            yield zip(part for task in self.order * rounds for part in islice(turns[task], 1))


class Drawing(Sampler):
    """Each step draws a task; its stream goes on across epochs, so small tasks cycle."""

    @abstractmethod
    def weights(self, progress: NDArray[np.float64], /) -> NDArray[np.float64]:
        """What the tasks' probabilities are proportional to: (tasks,), or (steps, tasks) where progress matters.

        Args:
            progress: (steps, 1), from 0 in the first step of the run to 1 in the last.
        """

    def _epochs(self) -> Iterator[Iterable[Step]]:
        cycles = [stream.cycle() for stream in self.streams.values()]
        every = [stream.batches for stream in self.streams.values()]
        steps = self.config.steps_per_epoch or STEPS[self.config.epoch](every)
        for epoch in range(self.planned_epochs):
            progress = np.arange(epoch * steps, (epoch + 1) * steps) / max(1, steps * self.planned_epochs - 1)
            bounds = np.cumsum(np.atleast_2d(self.weights(progress[:, None])), axis=1)  # (steps or 1, tasks)
            points = self._order_rng(epoch).random((steps, 1)) * bounds[:, -1:]
            drawn = np.sum(points >= bounds[:, :-1], axis=1)  # (steps,): how many tasks lie below the point
            yield ((next(cycles[task]),) for task in drawn)


class Proportional(Drawing):
    """All batches of all tasks in one random order, each row once an epoch, as in MT-DNN (Liu et al. 2019).

    Where the recipe gives an epoch another length, batches are drawn, with the same shares.
    """

    def weights(self, _progress: NDArray[np.float64], /) -> NDArray[np.float64]:
        return np.array([stream.batches for stream in self.streams.values()], dtype=np.float64)

    def _epochs(self) -> Iterator[Iterable[Step]]:
        if self.config.steps_per_epoch or self.config.epoch == "largest":
            yield from super()._epochs()
            return
        for epoch in range(self.planned_epochs):
            parts = [part for stream in self.streams.values() for part in stream.one_pass(epoch)]
            yield ((parts[place],) for place in self._order_rng(epoch).permutation(len(parts)))


class BySize(Drawing):
    """A task's share is its size, the rows of a pass, to the power alpha: 1 proportional, 0 uniform."""

    def weights(self, progress: NDArray[np.float64], /) -> NDArray[np.float64]:
        sizes = np.array([stream.size for stream in self.streams.values()], dtype=np.float64)
        return sizes ** self.alpha(progress)

    @abstractmethod
    def alpha(self, progress: NDArray[np.float64], /) -> NDArray[np.float64] | float: ...


class Uniform(BySize):
    """Each task as often as any other."""

    def alpha(self, _progress: NDArray[np.float64], /) -> float:
        return 0.0


class Power(BySize):
    """Alpha as written."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.alpha < 0:
            raise MinbertError(f"sampler.alpha is {self.config.alpha:g}; expected 0 (uniform) to 1 (proportional)")

    def alpha(self, _progress: NDArray[np.float64], /) -> float:
        return self.config.alpha


class Annealed(BySize):
    """From proportional in the first step of the run to uniform in the last.

    Stickland & Murray (2019) go down by epochs and stop at 0.2: alpha = 1 - 0.8 (e - 1) / (E - 1). Ours falls along a
    line, step by step, to 0.
    """

    def alpha(self, progress: NDArray[np.float64], /) -> NDArray[np.float64]:
        return 1 - progress


class Weighted(Drawing):
    """Shares as written, whatever the sizes: quora = 2 beside two unnamed tasks is every second step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = self.weights(np.zeros((1, 1)))
        if not np.isfinite(weights).all() or weights.min() < 0 or weights.sum() == 0:
            found = ", ".join(f"{task} = {weight:g}" for task, weight in zip(self.streams, weights, strict=True))
            raise MinbertError(f"sampler.weights are {found}; expected none below 0 and at least one above")

    def weights(self, _progress: NDArray[np.float64], /) -> NDArray[np.float64]:
        return np.array([self.config.weights.get(task, 1.0) for task in self.streams])


class All(Sampler):
    """Each step has one batch of every task; an epoch is one pass over the largest, the others cycle."""

    def _epochs(self) -> Iterator[Iterable[Step]]:
        cycles = [stream.cycle() for stream in self.streams.values()]
        largest = max(self.streams.values(), key=lambda stream: stream.batches)
        for epoch in range(self.planned_epochs):
            steps = self.config.steps_per_epoch or len(largest.one_pass(epoch))
            yield (tuple(next(cycle) for cycle in cycles) for _ in range(steps))


class Mixed(Sampler):
    """Rows of all tasks shuffled together; a step has a part for each task that is in its batch.

    They are not sorted by length, which would gather the task of the shortest texts in a few batches and leave it out of
    others; only a token budget has them sorted, as it has every batch.
    """

    def _epochs(self) -> Iterator[Iterable[Step]]:
        streams = list(self.streams.values())
        bucket = BUCKET if self.budget.tokens else 1
        for epoch in range(self.planned_epochs):
            rng = self._order_rng(epoch)
            chosen = [stream.choose(rng) for stream in streams]
            rows = np.concatenate(chosen)
            owners = np.repeat(np.arange(len(streams)), [len(own) for own in chosen])
            lengths = np.concatenate([stream.lengths[own] for stream, own in zip(streams, chosen, strict=True)])
            yield (
                tuple(
                    Part(streams[task].task, rows[batch[owners[batch] == task]], epoch)
                    for task in np.unique(owners[batch])
                )
                for batch in self.budget.cut(lengths, rng, bucket=bucket)
            )


@dataclass(frozen=True)
class Thinned(Sampler):
    """Another sampler's run with fewer steps: one at random out of each stretch, so that every epoch and every task
    keeps its share, the order stays, and tasks that take turns are all met.
    """

    whole: Sampler
    steps: int
    """Of the whole run."""
    kept: tuple[int, ...]
    """Of each epoch, those that stay."""

    def _epochs(self) -> Iterator[Iterable[Step]]:
        for epoch, (steps, kept) in enumerate(zip(self.whole.epochs(), self.kept, strict=True)):
            every = list(steps)
            rng = np.random.default_rng([self.seed, THINNING, 0, epoch])
            stretches = np.array_split(np.arange(len(every)), kept) if kept else []
            yield [every[int(rng.choice(stretch))] for stretch in stretches]


def thinned(sampler: Sampler, steps: int) -> Sampler:
    """The sampler itself if its run has at most so many steps (0: any number), or a run of just so many."""
    sizes = [sum(1 for _ in epoch) for epoch in sampler.epochs()] if steps else []
    if sum(sizes) <= steps:
        return sampler
    whole = sum(sizes)
    ends = [round(steps * end / whole) for end in accumulate(sizes, initial=0)]
    kept = tuple(end - start for start, end in pairwise(ends))
    inherited = (sampler.config, sampler.streams, sampler.planned_epochs, sampler.budget, sampler.seed)
    return Thinned(*inherited, whole=sampler, steps=whole, kept=kept)


SAMPLERS: dict[str, type[Sampler]] = {
    "sequential": Sequential,
    "round-robin": RoundRobin,
    "proportional": Proportional,
    "uniform": Uniform,
    "power": Power,
    "annealed": Annealed,
    "weighted": Weighted,
    "all": All,
    "mixed": Mixed,
}


def make_sampler(
    config: SamplerConfig,
    lengths: Mapping[str, NDArray[np.integer]],
    *,
    epochs: int,
    batch_size: int,
    batch_tokens: int = 0,
    fractions: Mapping[str, float] | None = None,
    texts: Mapping[str, NDArray[np.int64]] | None = None,
    max_steps: int = 0,
    seed: int,
) -> Sampler:
    """The sampler that a recipe asks for.

    Args:
        config: which, and its settings.
        lengths: tokens of each training row, by task; the order of tasks is the order of this mapping.
        epochs: of the run.
        batch_size: rows of a batch, at most.
        batch_tokens: tokens of a batch, padding counted, at most; 0: only the rows count.
        fractions: how much of a task's rows a pass takes: below 1 a fresh random part, 2 each row twice; default 1.
        texts: numbered texts of each row, (rows, texts), of tasks none of whose batches shall hold a text twice.
        max_steps: a longer run is thinned to so many; 0: none is.
        seed: from which all randomness comes.
    """
    fractions, texts = fractions or {}, texts or {}
    _check(config, lengths, fractions, seed)
    budget = Budget(batch_size, batch_tokens)
    streams = {
        task: Stream(task, index, np.asarray(tokens), fractions.get(task, 1.0), budget, seed, texts.get(task))
        for index, (task, tokens) in enumerate(lengths.items())
    }
    return thinned(SAMPLERS[config.kind](config, streams, epochs, budget, seed), max_steps)


def _check(
    config: SamplerConfig, lengths: Mapping[str, NDArray[np.integer]], fractions: Mapping[str, float], seed: int
) -> None:
    if not lengths:
        raise MinbertError("no tasks to sample from; expected at least one")
    for task, tokens in lengths.items():
        if len(tokens) == 0:
            raise MinbertError(f'task "{task}" has 0 training rows; expected at least 1')
        if not 0 < fractions.get(task, 1) <= 100:
            raise MinbertError(f'fraction of "{task}" is {fractions[task]:g}; expected more than 0 and at most 100')
    for name in (*config.order, *config.weights, *fractions):
        if name not in lengths:
            raise MinbertError(f'sampler names "{name}"{suggest(name, lengths)}; the tasks are: {", ".join(lengths)}')
    left = [task for task in lengths if config.order and task not in config.order]
    if left:
        raise MinbertError(f"sampler.order leaves out {', '.join(left)}; expected every task at least once")
    if seed < 0:
        raise MinbertError(f"seed is {seed}; expected 0 or more")
