"""The seam where the tasks' losses become one gradient.

A rule takes the weighted losses of a step, by task, and leaves its result in the parameters' `.grad`, added to what is
there (so that gradients can accumulate over several batches).

`add_gradients` is the plain one: all tasks in one forward and one backward pass. A `Surgery` looks at each task's
gradient by itself, and weights them by how they agree:

    PCGrad     a gradient loses what points against another task's (Yu et al. 2020, arXiv:2001.06782)
    GradVac    each pair is turned to the angle it usually has (Wang et al. 2021, arXiv:2010.05874)
    CAGrad     the direction near the mean that is best for the worst-off task (Liu et al. 2021, arXiv:2110.14048)

All three sum. With `loss_weighting = "mean"` the losses come divided by the number of tasks, and since each rule gives
twice the result for gradients twice as long, that is the mean of the projected gradients.

TorchJD has these and more. It is not on our GPU machine, and the whole of the algebra is on a matrix of tasks x tasks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from minbert.config import Recipe
from minbert.model.multitask import MultitaskModel
from minbert.training.cagrad import avert_conflicts

GradientRule = Callable[[Mapping[str, Tensor]], None]
SURGERY = 5  # what a generator is for; 1 and 2 are the samplers', 3 and 4 the experiment's
BLOCK = 1 << 14  # products of so many float32 numbers are added in float32, their sums in float64
STRAIGHT = 1 - 1e-6  # the cosine that GradVac turns a pair up to, at most: 0.08 degrees


def add_gradients(losses: Mapping[str, Tensor]) -> None:
    """The gradient of the sum: one backward pass."""
    _backward(torch.stack(list(losses.values())).sum())


class Surgery(ABC):
    """A rule that looks up one loss after the other: a task's graph is gone before the next loss is asked for.

    Surgery is on the shared parameters that several tasks of the step reach. All others (heads, learned loss weights, a
    pooler that only one task reads) have the gradient of their one task, untouched, and no part in the angles.

    Memory: a row of shared parameters for each task, kept from step to step, and one gradient: of the task at hand, then
    the result. So it is with gradients of earlier batches too: they wait in the last task's row until its turn comes.
    A step of one task takes no rows. `retain_graph` is never needed. The matrix of dot products is read back from the
    device, so a step waits once, and no CUDA graph can hold it whole; its passes can be held (`task_graphs.py`).

    Args:
        shared: the parameters that several tasks may reach.
        tasks: of the run; a step may have only some of them.
        seed: from which, with the number of the step, random orders come.
    """

    def __init__(self, shared: Iterable[Parameter], tasks: Iterable[str], *, seed: int) -> None:
        self.shared, self.tasks, self.seed = list(shared), tuple(tasks), seed
        self.state: dict[str, Tensor] = {"steps": torch.zeros((), dtype=torch.int64)}
        """What a checkpoint has to hold."""
        self.rows = torch.empty((len(self.tasks), 0))
        self.views: list[list[Tensor]] = []  # each row of `rows` in the parameters' shapes
        self.laid_out: list[Parameter] = []  # for these

    def __call__(self, losses: Mapping[str, Tensor]) -> None:
        if len(losses) == 1:  # there is nothing to weigh it against
            _backward(*losses.values())
            self.state["steps"] += 1
            return
        self.lay_out()
        last = len(losses) - 1
        waiting = self._put_aside(last)
        reached = np.array(
            [self.take(row, losses[task], waiting if row == last else ()) for row, task in enumerate(losses)],
            dtype=bool,
        )
        for place, own in self._of_one_task(reached):
            self._add(place, own)
        self._sum_up(list(losses))
        for place in np.flatnonzero(reached.sum(axis=0) > 1).tolist():
            self._add(place, self.views[0][place])

    def lay_out(self) -> None:
        """A row for each task, of what learns now; in another epoch it may be more."""
        learning = [parameter for parameter in self.shared if parameter.requires_grad]
        if [*map(id, learning)] == [*map(id, self.laid_out)] and self.views:
            return
        sizes = [parameter.numel() for parameter in learning]
        like = learning[0] if learning else self.rows
        self.rows = self.rows[:, :0]  # let go of the old one first
        self.views = []
        self.rows = torch.empty((len(self.tasks), sum(sizes)), dtype=like.dtype, device=like.device)
        self.views = [
            [part.view_as(parameter) for part, parameter in zip(row.split(sizes), learning, strict=True)]
            for row in self.rows
        ]
        self.laid_out = learning

    def take(self, row: int, loss: Tensor, waiting: Sequence[bool] = ()) -> list[bool]:
        """The gradient of a task's loss into a row, 0 where it has none; which of `laid_out` it reaches.

        No parameter has a gradient afterwards, but for those that are `waiting`: they have what was in the row.
        """
        for parameter in self.laid_out:
            parameter.grad = None
        _backward(loss)
        found, missing = [], []
        reached = [parameter.grad is not None for parameter in self.laid_out]
        for place, (parameter, view) in enumerate(zip(self.laid_out, self.views[row], strict=True)):
            if waiting and waiting[place]:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                _swap(parameter.grad, view)
            elif parameter.grad is not None:
                found.append((view, parameter.grad))
                parameter.grad = None
            else:
                missing.append(view)
        if found:
            torch._foreach_copy_([view for view, _ in found], [grad for _, grad in found])
        if missing:
            torch._foreach_zero_(missing)
        return reached

    def combine(self, tasks: Sequence[str], reached: NDArray[np.bool_]) -> None:
        """The result for the tasks whose gradients were taken, in the first row. What only one of several tasks reaches
        takes its memory twice meanwhile.

        Args:
            tasks: of the rows.
            reached: (tasks, parameters), as `take` says.
        """
        if len(tasks) == 1:  # it is there
            self.state["steps"] += 1
            return
        apart = [(self.views[0][place], own.clone()) for place, own in self._of_one_task(reached)]
        self._sum_up(tasks)
        for view, own in apart:
            view.copy_(own)

    @abstractmethod
    def weigh(self, gram: NDArray[np.float64], tasks: Sequence[str], rng: np.random.Generator) -> NDArray[np.float64]:
        """The factor of each task's gradient in the result, (tasks,), from the gradients' dot products."""

    def _put_aside(self, row: int) -> list[bool]:
        """The gradients that are there, of earlier batches, into a row; which of `laid_out` have one."""
        pairs = list(zip(self.laid_out, self.views[row], strict=True))
        held = [(view, parameter.grad) for parameter, view in pairs if parameter.grad is not None]
        if held:
            torch._foreach_copy_([view for view, _ in held], [grad for _, grad in held])
        waiting = [parameter.grad is not None for parameter in self.laid_out]
        for parameter in self.laid_out:
            parameter.grad = None
        return waiting

    def _of_one_task(self, reached: NDArray[np.bool_]) -> Iterator[tuple[int, Tensor]]:
        """The places that only one task has a gradient for, each with that; it is 0 when the next is asked for."""
        for place in np.flatnonzero(reached.sum(axis=0) == 1).tolist():
            view = self.views[int(reached[:, place].argmax())][place]
            yield place, view
            view.zero_()

    def _add(self, place: int, found: Tensor) -> None:
        parameter = self.laid_out[place]
        parameter.grad = found.clone() if parameter.grad is None else parameter.grad.add_(found)

    def _sum_up(self, tasks: Sequence[str]) -> None:
        """The weighted sum of the rows, in the first."""
        first, *others = self.rows[: len(tasks)]
        weights = self._weights(tasks)
        first.mul_(weights[0])
        for row, weight in zip(others, weights[1:], strict=True):
            first.add_(row, alpha=weight)

    def _weights(self, tasks: Sequence[str]) -> list[float]:
        gram = gram_matrix(self.rows[: len(tasks)])
        rng = np.random.default_rng([self.seed, SURGERY, int(self.state["steps"])])
        self.state["steps"] += 1
        if not np.isfinite(gram).all():  # the sum is not finite either, which the loss scale and the log look for
            return [1.0] * len(tasks)
        return self.weigh(gram, tasks, rng).tolist()


class PCGrad(Surgery):
    """Each gradient in turn: from what is left of it, the part along every other task's gradient that it has a negative
    dot product with is taken away, the others in random order. The result is the sum.
    """

    def weigh(self, gram: NDArray[np.float64], tasks: Sequence[str], rng: np.random.Generator) -> NDArray[np.float64]:
        return project_conflicts(gram, random_orders(len(tasks), rng))


class GradVac(Surgery):
    """PCGrad with a goal of its own for every ordered pair of tasks, instead of a right angle: the moving average of
    the cosines that were seen, from 0. A pair below its goal is turned up to it.

    One goal for all shared parameters together; the paper has one for each layer. A goal of 1 would take endlessly much
    of the other gradient, so a pair is turned up to `STRAIGHT` at most.

    Args:
        beta: how fast the goals follow.
    """

    def __init__(self, shared: Iterable[Parameter], tasks: Iterable[str], *, seed: int, beta: float = 0.01) -> None:
        super().__init__(shared, tasks, seed=seed)
        self.beta = beta
        self.state["goals"] = torch.zeros((len(self.tasks), len(self.tasks)), dtype=torch.float64)

    def weigh(self, gram: NDArray[np.float64], tasks: Sequence[str], rng: np.random.Generator) -> NDArray[np.float64]:
        places = np.ix_(*[[self.tasks.index(task) for task in tasks]] * 2)
        goals = self.state["goals"].numpy()  # the very same memory
        weights, goals[places] = turn_to_goals(gram, random_orders(len(tasks), rng), goals[places], self.beta)
        return weights


class CAGrad(Surgery):
    """The direction d within c times the mean gradient's length of the mean g0, for which the smallest of the dot
    products with the tasks' gradients is largest. Times the number of tasks, so that c = 0 is the sum.

    The authors' code divides d by 1 + c^2 afterwards, their paper does not; nor do we.

    Args:
        c: 0 is the plain sum; towards 1, which it has to be below, the worst-off task decides.
    """

    def __init__(self, shared: Iterable[Parameter], tasks: Iterable[str], *, seed: int, c: float = 0.5) -> None:
        super().__init__(shared, tasks, seed=seed)
        self.c = c

    def weigh(self, gram: NDArray[np.float64], tasks: Sequence[str], rng: np.random.Generator) -> NDArray[np.float64]:  # noqa: ARG002 - nothing is random here
        return avert_conflicts(gram, self.c)


def random_orders(tasks: int, rng: np.random.Generator) -> list[list[int]]:
    """For each task the others, shuffled."""
    return [rng.permutation([other for other in range(tasks) if other != task]).tolist() for task in range(tasks)]


def project_conflicts(gram: NDArray[np.float64], orders: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """PCGrad's factors, (tasks,). Row i of `parts` is what is left of gradient i, as a combination of all."""
    parts = np.eye(len(gram))
    for task, order in enumerate(orders):
        for other in order:
            product = parts[task] @ gram[:, other]
            if product < 0:
                parts[task, other] -= product / gram[other, other]
    return parts.sum(axis=0)


def turn_to_goals(
    gram: NDArray[np.float64], orders: Sequence[Sequence[int]], goals: NDArray[np.float64], beta: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """GradVac's factors, (tasks,), and the goals after this step, (tasks, tasks)."""
    parts, after = np.eye(len(gram)), goals.copy()
    lengths = np.sqrt(np.diag(gram))
    for task, order in enumerate(orders):
        for other in order:
            length = math.sqrt(max(0.0, parts[task] @ gram @ parts[task]))
            if length <= 1e-6 * lengths[task] or lengths[other] == 0:  # nothing is left: there is no angle
                continue
            cosine = float(np.clip(parts[task] @ gram[:, other] / (length * lengths[other]), -1, 1))
            goal = goals[task, other]
            aim = min(goal, STRAIGHT)
            if cosine < aim:
                sine, aim_sine = math.sqrt(1 - cosine**2), math.sqrt(1 - aim**2)
                parts[task, other] += length * (aim * sine - cosine * aim_sine) / (lengths[other] * aim_sine)
            after[task, other] += beta * (cosine - goal)
    return parts.sum(axis=0), after


def gram_matrix(rows: Tensor) -> NDArray[np.float64]:
    """All dot products of the rows, (rows, rows). In float32 alone a sum of 20 million squares is off by 0.2%."""
    count, length = rows.shape
    whole = length // BLOCK * BLOCK
    blocks = rows[:, :whole].view(count, whole // BLOCK, BLOCK).transpose(0, 1)  # (blocks, rows, BLOCK)
    rest = rows[:, whole:]
    sums = (blocks @ blocks.mT).double().sum(dim=0) + (rest @ rest.T).double()
    return sums.cpu().numpy().reshape(count, count)


def make_rule(recipe: Recipe, model: MultitaskModel) -> GradientRule:
    """The rule that a recipe asks for. Everything but the heads is shared."""
    training = recipe.training
    shared = [parameter for name, parameter in model.named_parameters() if not name.startswith("heads.")]
    names = [task.name for task in recipe.tasks]
    rules: dict[str, Callable[[], GradientRule]] = {
        "sum": lambda: add_gradients,
        "pcgrad": lambda: PCGrad(shared, names, seed=recipe.seed),
        "gradvac": lambda: GradVac(shared, names, seed=recipe.seed, beta=training.gradvac_beta),
        "cagrad": lambda: CAGrad(shared, names, seed=recipe.seed, c=training.cagrad_c),
    }
    return rules[training.gradients]()


def _backward(loss: Tensor) -> None:
    if loss.requires_grad:  # not so where nothing learns: a cosine head on a frozen encoder
        loss.backward()  # type: ignore[no-untyped-call]


def _swap(one: Tensor, other: Tensor) -> None:
    """Each gets the other's numbers, bit for bit and in no other memory: a ^ b ^ b is a."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    one, other = one.view(whole), other.view(whole)
    one.bitwise_xor_(other)
    other.bitwise_xor_(one)
    one.bitwise_xor_(other)
