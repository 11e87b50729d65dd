"""Gradient surgery: cases worked by hand, PCGrad written out on vectors, CAGrad's dual against scipy; what is projected
and what is not; memory; runs that are stopped. `add_gradients` itself is in test_losses.py.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from minbert.errors import MinbertError
from minbert.experiment import train
from minbert.recipes import parse_recipe
from minbert.training import gradients
from minbert.training.cagrad import avert_conflicts, duality_gap, solve_dual
from minbert.training.gradients import (
    CAGrad,
    GradVac,
    PCGrad,
    Surgery,
    add_gradients,
    gram_matrix,
    make_rule,
    project_conflicts,
    random_orders,
    turn_to_goals,
)
from minbert.training.step import Later
from minbert.training.trainer import Trainer
from tests.runs import Listener, Stopped, small_recipe, small_trainer, unlike, weights_of

Vectors = NDArray[np.float64]
RULES: dict[str, type[Surgery]] = {"pcgrad": PCGrad, "gradvac": GradVac, "cagrad": CAGrad}


def dots(vectors: Any) -> Vectors:
    vectors = np.asarray(vectors, dtype=np.float64)
    return vectors @ vectors.T


def some(tasks: int, *, size: int = 6, seed: int = 0) -> Vectors:
    return np.random.default_rng(seed).normal(size=(tasks, size))


def all_orders(tasks: int) -> Iterator[Sequence[Sequence[int]]]:
    others = [[other for other in range(tasks) if other != task] for task in range(tasks)]
    return itertools.product(*(itertools.permutations(rest) for rest in others))


# --- PCGrad ---------------------------------------------------------------------------------------------------------


def test_two_gradients_that_conflict() -> None:
    """(1, 0) and (-1, 1) have a dot product of -1.

    Of the first, less -1/2 of the second, (1/2, 1/2) is left; of the second, less -1 of the first, (0, 1).
    """
    vectors = np.array([[1.0, 0.0], [-1.0, 1.0]])
    weights = project_conflicts(dots(vectors), [[1], [0]])
    assert weights.tolist() == [2, 1.5]
    assert (weights @ vectors).tolist() == [0.5, 1.5]


def test_three_gradients_in_a_given_order() -> None:
    """a = (1, 0, 0), b = (-1, 1, 0), c = (0, -1, 1): a and b conflict, b and c do, a and c are at right angles.

    a, by b then c: a + b/2 = (1/2, 1/2, 0), against c -1/2: + c/4 = (1/2, 1/4, 1/4).
    a, by c then b: c is no conflict yet, then a + b/2 = (1/2, 1/2, 0).
    b, by a then c: b + a = (0, 1, 0), against c -1: + c/2 = (0, 1/2, 1/2).
    c, by a then b: no conflict, then c + b/2 = (-1/2, -1/2, 1): against a only now, but a's turn is over.
    """
    vectors = np.array([[1.0, 0, 0], [-1, 1, 0], [0, -1, 1]])
    gram = dots(vectors)
    assert (project_conflicts(gram, [[1, 2], [0, 2], [0, 1]]) @ vectors).tolist() == [0, 0.25, 1.75]
    assert (project_conflicts(gram, [[2, 1], [0, 2], [0, 1]]) @ vectors).tolist() == [0, 0.5, 1.5]


def pcgrad_on_vectors(vectors: Vectors, orders: Sequence[Sequence[int]]) -> Vectors:
    """The paper's algorithm 1, line by line."""
    total = np.zeros_like(vectors[0])
    for own, order in zip(vectors, orders, strict=True):
        left = own.copy()
        for other in order:
            if left @ vectors[other] < 0:
                left -= left @ vectors[other] / (vectors[other] @ vectors[other]) * vectors[other]
        total += left
    return total


@pytest.mark.parametrize("tasks", [2, 3, 5, 8])
def test_factors_of_dot_products_are_the_algorithm_on_vectors(tasks: int) -> None:
    for seed in range(20):
        vectors = some(tasks, seed=seed)
        orders = random_orders(tasks, np.random.default_rng(seed))
        np.testing.assert_allclose(
            project_conflicts(dots(vectors), orders) @ vectors, pcgrad_on_vectors(vectors, orders), atol=1e-12
        )


def test_the_order_of_the_tasks_does_not_matter_on_average() -> None:
    """Over all orders, equally likely, the factors belong to the gradients and not to their places."""
    gram, shuffle = dots(some(3, size=3, seed=4)), [2, 0, 1]
    mean = np.mean([project_conflicts(gram, orders) for orders in all_orders(3)], axis=0)
    moved = np.mean([project_conflicts(gram[np.ix_(shuffle, shuffle)], orders) for orders in all_orders(3)], axis=0)
    np.testing.assert_allclose(moved, mean[shuffle], atol=1e-12)
    assert len({project_conflicts(gram, orders)[0] for orders in all_orders(3)}) > 1, "one order alone would matter"


def test_orders_are_of_the_others_and_all_of_them_come_up() -> None:
    rng = np.random.default_rng(0)
    drawn = [random_orders(3, rng) for _ in range(400)]
    counts = [sum(orders == list(map(list, expected)) for orders in drawn) for expected in all_orders(3)]
    assert sum(counts) == 400
    assert min(counts) > 20  # of about 50


# --- GradVac --------------------------------------------------------------------------------------------------------


def test_the_goal_is_reached() -> None:
    """(1, 0) and (0, 1) with a goal of 0.6: tan of the angle is 4/3, so the first becomes (1, 3/4)."""
    goals = np.array([[0.0, 0.6], [0.0, 0.0]])
    weights, after = turn_to_goals(np.eye(2), [[1], [0]], goals, beta=0.5)
    assert weights == pytest.approx([1, 1.75])
    assert after == pytest.approx(np.array([[0, 0.3], [0, 0]])), "halfway from 0.6 to the 0 that was seen"


@pytest.mark.parametrize("goal", [-0.5, 0.0, 0.3, 0.9])
def test_any_goal_is_reached(goal: float) -> None:
    for seed in range(10):
        vectors = some(2, seed=seed)
        gram = dots(vectors)
        cosine = gram[0, 1] / math.sqrt(gram[0, 0] * gram[1, 1])
        goals = np.array([[0.0, goal], [-1.0, 0.0]])  # only the first is turned
        weights, after = turn_to_goals(gram, [[1], [0]], goals, beta=0.1)
        turned = (weights - [0, 1]) @ vectors
        found = turned @ vectors[1] / np.linalg.norm(turned) / np.linalg.norm(vectors[1])
        assert found == pytest.approx(max(cosine, goal), abs=1e-9)
        assert after[0, 1] == pytest.approx(0.9 * goal + 0.1 * cosine)


@pytest.mark.parametrize("tasks", [2, 3, 5])
def test_goals_of_nought_are_right_angles(tasks: int) -> None:
    """GradVac's first step is PCGrad's."""
    gram, orders = dots(some(tasks, seed=tasks)), random_orders(tasks, np.random.default_rng(1))
    weights, _ = turn_to_goals(gram, orders, np.zeros((tasks, tasks)), beta=0.01)
    np.testing.assert_allclose(weights, project_conflicts(gram, orders), atol=1e-9)


def test_opposite_gradients_leave_nothing() -> None:
    gram = dots([[1.0, 0], [-2, 0], [0, 1]])
    weights, after = turn_to_goals(gram, [[1, 2], [0, 2], [0, 1]], np.zeros((3, 3)), beta=0.01)
    assert weights @ gram @ weights == pytest.approx(1), "only the third is left"
    assert np.isfinite(after).all()


def test_goals_that_follow_at_once_may_be_straight_lines() -> None:
    """A pair in one line sets a goal of 1, and no finite part of another gradient turns one that far."""
    rule, line = GradVac([], "abc", seed=1, beta=1.0), np.array([[1.0, 0], [3, 0], [0, 1]])
    found = [rule.weigh(dots(vectors), "abc", np.random.default_rng(0)) for vectors in (line, some(3), line, some(3))]
    assert np.isfinite(found).all()
    assert rule.state["goals"].isfinite().all()


@pytest.mark.parametrize("goal", [1.0, 1 + 1e-15])
def test_a_pair_is_turned_until_it_is_nearly_straight(goal: float) -> None:
    """Rounding can leave a goal above 1."""
    weights, after = turn_to_goals(np.eye(2), [[1], [0]], np.array([[0.0, goal], [0.0, 0.0]]), beta=0.5)
    turned = weights - [0, 1]
    assert turned[1] / np.linalg.norm(turned) == pytest.approx(1 - 1e-6, abs=1e-12)
    assert after[0, 1] == pytest.approx(goal / 2)


def test_goals_belong_to_tasks_not_to_places() -> None:
    rule = GradVac([], ["a", "b", "c"], seed=1, beta=0.5)
    rule.weigh(np.array([[1.0, 0.8], [0.8, 1.0]]), ["a", "c"], np.random.default_rng(0))
    expected = np.zeros((3, 3))
    expected[0, 2] = expected[2, 0] = 0.4
    np.testing.assert_allclose(rule.state["goals"].numpy(), expected)


# --- CAGrad ---------------------------------------------------------------------------------------------------------


def dual(gram: Vectors, radius: float, mixture: Vectors) -> float:
    return float(mixture @ gram.mean(axis=1) + radius * math.sqrt(max(0.0, mixture @ gram @ mixture)))


def test_a_symmetric_pair_by_hand() -> None:
    """(1, 1) and (-1, 1): the mean, (0, 1), is the mixture too, so the direction is (1 + c) times it."""
    vectors = np.array([[1.0, 1.0], [-1.0, 1.0]])
    assert solve_dual(dots(vectors), 0.5) == pytest.approx([0.5, 0.5])
    assert avert_conflicts(dots(vectors), 0.5) @ vectors == pytest.approx([0, 3])


def test_the_weaker_task_decides() -> None:
    """(3, 0) and (-1, 0) with c = 1/2: the mean is (1, 0) and the best for the second is to go back by half of it."""
    vectors = np.array([[3.0, 1e-3], [-1.0, 1e-3]])
    assert avert_conflicts(dots(vectors), 0.5) @ vectors / 2 == pytest.approx([0.5, 0], abs=2e-3)


@pytest.mark.parity
@pytest.mark.parametrize("tasks", [2, 3, 4, 6])
@pytest.mark.parametrize("c", [0.1, 0.5, 0.9])
def test_the_dual_is_solved_as_scipy_solves_it(tasks: int, c: float) -> None:
    from scipy.optimize import minimize

    for seed in range(8):
        gram = dots(some(tasks, seed=100 * tasks + seed))
        radius = c * math.sqrt(gram.mean())
        ours = solve_dual(gram, radius)
        assert ours.min() >= 0
        assert ours.sum() == pytest.approx(1)
        theirs = minimize(
            lambda mixture, gram=gram, radius=radius: dual(gram, radius, mixture),
            np.full(tasks, 1 / tasks),
            method="SLSQP",
            bounds=[(0, 1)] * tasks,
            constraints={"type": "eq", "fun": lambda mixture: mixture.sum() - 1},
            options={"ftol": 1e-14, "maxiter": 1000},
        )
        assert dual(gram, radius, ours) <= theirs.fun + 1e-9


@pytest.mark.parametrize("c", [0.2, 0.5, 0.8])
def test_no_direction_in_the_ball_is_better_for_the_worst_off(c: float) -> None:
    """What CAGrad is for, by trying: the smallest dot product with a task's gradient, within c |g0| of g0."""
    rng = np.random.default_rng(7)
    for seed in range(10):
        vectors = some(3, size=3, seed=seed)
        mean = vectors.mean(axis=0)
        found = avert_conflicts(dots(vectors), c) @ vectors / 3
        radius = c * np.linalg.norm(mean)
        assert np.linalg.norm(found - mean) == pytest.approx(radius)
        tried = rng.normal(size=(20_000, 3))
        tried = mean + radius * tried / np.linalg.norm(tried, axis=1, keepdims=True)
        assert (tried @ vectors.T).min(axis=1).max() <= (vectors @ found).min() + 1e-9


def test_three_can_move_where_no_pair_can() -> None:
    """(2, 2), (0, -1) and (-2, 2): the mean is (0, 1), and moving weight in pairs ends where the mixture is 0. From there
    the first and the third have to give to the second at once; with c = 0.9 it has all in the end, and a tenth is left.
    """
    vectors = np.array([[2.0, 2.0], [0.0, -1.0], [-2.0, 2.0]])
    assert solve_dual(dots(vectors), 0.9) == pytest.approx([0, 1, 0], abs=1e-9)
    assert avert_conflicts(dots(vectors), 0.9) @ vectors / 3 == pytest.approx([0, 0.1])


DEGENERATE: dict[str, Callable[[Vectors], Any]] = {
    "independent": lambda vectors: vectors,
    "in a plane": lambda vectors: vectors[:, :2],
    "on a line": lambda vectors: vectors[:, :1],
    "the same twice": lambda vectors: [vectors[1], *vectors[1:]],
    "opposite": lambda vectors: [-2 * vectors[1], *vectors[1:]],
    "nearly opposite": lambda vectors: [-2 * vectors[1] + 1e-5 * vectors[0], *vectors[1:]],
    "nought": lambda vectors: [0 * vectors[0], *vectors[1:]],
    "cancelling out": lambda vectors: [-1.001 * vectors[1:].sum(axis=0), *vectors[1:]],
    "of all lengths": lambda vectors: vectors * 10.0 ** np.arange(len(vectors))[:, None],
    "rounded": lambda vectors: vectors[:, :2].astype(np.float16),
}


def duals(kind: str, tasks: Sequence[int], count: int) -> Iterator[tuple[Vectors, float, Vectors]]:
    """Dot products and radius of random gradients, divided by the largest square, with the mixture for them."""
    for seed in range(count):
        gram = dots(DEGENERATE[kind](some(tasks[seed % len(tasks)], seed=seed)))
        gram /= gram.diagonal().max()
        radius = (0.3, 0.6, 0.9, 0.99)[seed // 3 % 4] * math.sqrt(gram.mean().clip(min=0))
        mixture = solve_dual(gram, radius)
        assert mixture.min() >= 0
        assert mixture.sum() == pytest.approx(1)
        yield gram, radius, mixture


@pytest.mark.parametrize("kind", DEGENERATE)
def test_no_mixture_of_three_is_better(kind: str) -> None:
    """All in steps of 1/80, and then around the best of them."""
    sides = np.array([(one, other, 80 - one - other) for one in range(81) for other in range(81 - one)]) / 80
    for gram, radius, mixture in duals(kind, [3], 200):
        best = np.full(3, 1 / 3)
        for size in (1.0, 0.1, 0.01):
            tried = np.clip((1 - size) * best + size * sides, 0, 1)
            lengths = np.sqrt(np.einsum("ni,ij,nj->n", tried, gram, tried).clip(min=0))
            best = tried[(tried @ gram.mean(axis=1) + radius * lengths).argmin()]
        assert dual(gram, radius, mixture) <= dual(gram, radius, best) + 1e-8


@pytest.mark.parity
@pytest.mark.parametrize("kind", DEGENERATE)
def test_scipy_finds_no_better_mixture(kind: str) -> None:
    from scipy.optimize import minimize

    for gram, radius, mixture in duals(kind, [3, 4, 5, 6], 100):
        mean, ones = gram.mean(axis=1), np.ones(len(gram))

        def slopes(found: Vectors, gram: Vectors = gram, radius: float = radius, mean: Vectors = mean) -> Vectors:
            return mean + radius * (gram @ found) / math.sqrt(max(1e-30, found @ gram @ found))

        theirs = minimize(
            lambda found, gram=gram, radius=radius: dual(gram, radius, found),
            ones / len(gram),
            jac=slopes,
            method="SLSQP",
            bounds=[(0, 1)] * len(gram),
            constraints={"type": "eq", "fun": lambda found: found.sum() - 1, "jac": lambda _, ones=ones: ones},
            options={"ftol": 1e-14, "maxiter": 1000},
        )
        best = theirs.x.clip(0, 1) / theirs.x.clip(0, 1).sum()
        assert dual(gram, radius, mixture) <= dual(gram, radius, best) + 1e-8


def test_the_gap_says_how_far_a_mixture_is_off() -> None:
    for gram, radius, mixture in duals("independent", [3, 5], 100):
        rough = np.full(len(gram), 1 / len(gram))
        less = dual(gram, radius, rough) - dual(gram, radius, mixture)
        assert 0 <= less <= duality_gap(gram, radius, rough) + 1e-12
        assert abs(duality_gap(gram, radius, mixture)) < 1e-8


def test_cagrad_does_not_care_about_the_order_of_tasks() -> None:
    gram, shuffle = dots(some(4, seed=3)), [2, 0, 3, 1]
    np.testing.assert_allclose(
        avert_conflicts(gram[np.ix_(shuffle, shuffle)], 0.5), avert_conflicts(gram, 0.5)[shuffle], rtol=1e-6
    )


def test_no_radius_is_the_sum() -> None:
    assert avert_conflicts(dots(some(3)), 0.0).tolist() == [1, 1, 1]


def test_gradients_that_cancel_out_are_no_reason_to_explode() -> None:
    """A mixture whose length is rounding."""
    vectors = np.array([[1.0, 1e-8], [-1.0, 2e-8], [0.5, 0.0]])
    weights = avert_conflicts(dots(vectors), 0.5)
    assert np.linalg.norm(weights @ vectors) < 2


# --- all three, on dot products -------------------------------------------------------------------------------------


def weigh(kind: str, gram: Vectors, *, seed: int = 0) -> Vectors:
    tasks = [str(number) for number in range(len(gram))]
    return RULES[kind]([], tasks, seed=1).weigh(gram, tasks, np.random.default_rng(seed))


@pytest.mark.parametrize("kind", ["pcgrad", "gradvac"])
@pytest.mark.parametrize("tasks", [2, 3, 5])
def test_without_conflict_it_is_the_sum(kind: str, tasks: int) -> None:
    assert weigh(kind, dots(np.abs(some(tasks)))).tolist() == [1] * tasks


@pytest.mark.parametrize("kind", RULES)
def test_longer_gradients_are_a_longer_result(kind: str) -> None:
    """So dividing the losses by the number of tasks is the mean of the projected gradients."""
    gram = dots(some(3, seed=5))
    for scale in (1e-12, 1 / 9, 1e12):
        np.testing.assert_allclose(weigh(kind, scale * gram), weigh(kind, gram), rtol=1e-6)


@pytest.mark.parametrize("kind", RULES)
def test_nothing_at_all(kind: str) -> None:
    assert weigh(kind, np.zeros((3, 3))).tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", RULES)
def test_a_task_without_a_gradient_changes_nothing_for_the_others(kind: str) -> None:
    vectors = some(3, seed=2)
    vectors[1] = 0
    weights = weigh(kind, dots(vectors))
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights[[0, 2]], weigh(kind, dots(vectors[[0, 2]])))


@pytest.mark.parametrize("kind", ["pcgrad", "gradvac"])
def test_one_task_keeps_its_gradient(kind: str) -> None:
    assert weigh(kind, np.array([[4.0]])).tolist() == [1]


@pytest.mark.parametrize("length", [0, 5, 3 * gradients.BLOCK, 3 * gradients.BLOCK + 5])
def test_dot_products_of_long_rows(length: int) -> None:
    rows = torch.randn((3, length), generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(gram_matrix(rows), dots(rows.double().numpy()), rtol=1e-5, atol=1e-3)


# --- on parameters --------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A shared layer, one that only task a reads, one that nobody does, and a head for each task.

    The heads begin alike; b wants what the others do not.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.pooler, self.idle = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.heads = nn.ModuleDict({task: nn.Linear(4, 1) for task in tasks})
        for head in self.heads.values():
            head.load_state_dict(self.heads[tasks[0]].state_dict())

    def shared(self) -> list[nn.Parameter]:
        return [*self.body.parameters(), *self.pooler.parameters(), *self.idle.parameters()]

    def loss(self, task: str) -> Tensor:
        inputs = torch.randn((7, 5), generator=torch.Generator().manual_seed(ord(task[0])))
        hidden = torch.tanh(self.body(inputs.to(self.body.weight.device)))
        hidden = self.pooler(hidden) if task == "a" else hidden
        return (self.heads[task](hidden) - (3 if task == "b" else -3)).square().mean()

    def losses(self, scale: float = 1.0) -> Later:
        return Later({task: lambda task=task: scale * self.loss(task) for task in self.heads})

    def grads(self) -> dict[str, Tensor | None]:
        return {name: p.grad if p.grad is None else p.grad.clone() for name, p in self.named_parameters()}


def gradients_of(rule: Callable[[Mapping[str, Tensor]], None], model: Small, scale: float = 1.0) -> dict[str, Any]:
    model.zero_grad()
    rule(model.losses(scale))
    return model.grads()


def by_task(model: Small) -> dict[str, dict[str, Any]]:
    found = {}
    for task in model.heads:
        model.zero_grad()
        model.loss(task).backward()
        found[task] = model.grads()
    return found


def flat(grads: Mapping[str, Any], names: Sequence[str]) -> Vectors:
    return np.concatenate([grads[name].double().numpy().ravel() for name in names])


BODY = ["body.weight", "body.bias"]


@pytest.mark.parametrize("kind", RULES)
def test_only_what_several_tasks_reach_is_projected(kind: str) -> None:
    model = Small("abc")
    alone = by_task(model)
    rule = RULES[kind](model.shared(), "abc", seed=1)
    found = gradients_of(rule, model)
    vectors = np.array([flat(alone[task], BODY) for task in "abc"])
    weights = RULES[kind]([], "abc", seed=1).weigh(
        dots(vectors), "abc", np.random.default_rng([1, gradients.SURGERY, 0])
    )
    assert (np.abs(weights - 1) > 0.1).any(), "or this shows nothing"
    np.testing.assert_allclose(flat(found, BODY), weights @ vectors, rtol=1e-4, atol=1e-5)
    for name in ("pooler.weight", "pooler.bias"):
        torch.testing.assert_close(found[name], alone["a"][name])
    for task in "abc":
        for name in (f"heads.{task}.weight", f"heads.{task}.bias"):
            torch.testing.assert_close(found[name], alone[task][name])
    assert found["idle.weight"] is None, "the optimizer leaves it alone"


def test_without_conflict_it_is_the_gradient_of_the_sum() -> None:
    model = Small("cd")
    plain = gradients_of(add_gradients, model)
    alone = by_task(model)
    assert flat(alone["c"], BODY) @ flat(alone["d"], BODY) > 0
    found = gradients_of(PCGrad(model.shared(), "cd", seed=1), model)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("kind", RULES)
def test_it_adds_to_what_is_there(kind: str) -> None:
    model = Small("abc")
    once = gradients_of(RULES[kind](model.shared(), "abc", seed=1), model)
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    RULES[kind](model.shared(), "abc", seed=1)(model.losses())
    for name, value in model.grads().items():
        torch.testing.assert_close(value, torch.ones_like(value) if once[name] is None else once[name] + 1)


@pytest.mark.parametrize("kind", RULES)
def test_a_step_of_one_task_is_its_gradient(kind: str) -> None:
    """It counts as a step, and teaches the rule nothing."""
    model = Small("abc")
    alone = by_task(model)["b"]
    model.zero_grad()
    rule = RULES[kind](model.shared(), "abc", seed=1)
    before = {name: value.clone() for name, value in rule.state.items()}
    for number in (1, 2):
        rule(Later({"b": lambda: model.loss("b")}))
        for name, value in model.grads().items():
            assert (value is None) == (alone[name] is None)
            if value is not None:
                torch.testing.assert_close(value, number * alone[name], rtol=0, atol=0)
    assert rule.state.pop("steps") == before.pop("steps") + 2
    assert all(torch.equal(rule.state[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", RULES)
def test_losses_divided_by_the_tasks_are_the_mean(kind: str) -> None:
    model = Small("abc")
    total = gradients_of(RULES[kind](model.shared(), "abc", seed=1), model)
    mean = gradients_of(RULES[kind](model.shared(), "abc", seed=1), model, scale=1 / 3)
    for name, value in total.items():
        if value is not None:
            torch.testing.assert_close(mean[name], value / 3, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", RULES)
def test_what_is_frozen_stays_without_a_gradient(kind: str) -> None:
    model = Small("abc")
    rule = RULES[kind](model.shared(), "abc", seed=1)
    model.body.requires_grad_(False)
    frozen = gradients_of(rule, model)
    assert frozen["body.weight"] is None
    assert frozen["heads.b.weight"] is not None
    model.body.requires_grad_(True)
    assert gradients_of(rule, model)["body.weight"] is not None
    model.requires_grad_(False)
    assert set(gradients_of(rule, model).values()) == {None}


@pytest.mark.parametrize("kind", RULES)
def test_a_gradient_that_is_not_finite_is_passed_on(kind: str) -> None:
    """The loss scale looks for it, and the goals do not learn from it."""
    model = Small("abc")
    rule = RULES[kind](model.shared(), "abc", seed=1)
    before = {name: value.clone() for name, value in rule.state.items() if name != "steps"}
    found = gradients_of(rule, model, scale=math.inf)
    assert not found["body.weight"].isfinite().all()
    assert all(torch.equal(rule.state[name], value) for name, value in before.items())


def test_a_task_is_over_before_the_next_begins() -> None:
    model = Small("abc")
    alive: list[weakref.ref[Tensor]] = []

    def loss(task: str) -> Tensor:
        gc.collect()
        assert not any(ref() is not None for ref in alive)
        value = model.loss(task)
        alive.append(weakref.ref(value))
        return value

    PCGrad(model.shared(), "abc", seed=1)(Later({task: lambda task=task: loss(task) for task in "abc"}))
    assert len(alive) == 3


class Parts:
    """An encoder of eight equal parameters, a megabyte in all, and three tasks, whose backward passes take no more than
    their gradients do. Tasks b and c do not reach the first few parameters."""

    size = 1 << 18

    def __init__(self, kind: str, only_a: int = 0) -> None:
        self.parameters = [nn.Parameter(torch.ones(self.size // 8)) for _ in range(8)]
        self.rule, self.only_a = RULES[kind](self.parameters, "abc", seed=1), only_a

    def loss(self, task: str) -> Tensor:
        reached = list(enumerate(self.parameters))[0 if task == "a" else self.only_a :]
        return torch.stack([parameter.sum() * math.sin(ord(task) * place + 1) for place, parameter in reached]).sum()

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def run(self, steps: Sequence[str], accumulate: int = 1) -> None:
        """Batches of these tasks."""
        for number, tasks in enumerate(steps, start=1):
            self.rule(Later({task: lambda task=task: self.loss(task) for task in tasks}))
            assert self.parameters[-1].grad is not None
            if number % accumulate == 0:
                self.clear()


def encoders(work: Callable[[], object]) -> float:
    """The most memory, of all that was allocated since the beginning, that was in use at a time, within operations too:
    in gradients of the whole encoder, what is small rounded away."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return round(max(itertools.accumulate((event.nbytes() for event in events), initial=0)) / (4 * Parts.size), 1)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("only_a", [0, 3])
@pytest.mark.parametrize(
    ("steps", "accumulate"),
    [
        (["abc", "abc", "abc"], 1),
        (["abc", "abc", "abc"], 3),
        (["abc", "b", "a", "abc"], 1),
        (["abc", "b", "ca", "a", "c", "abc"], 6),
        (["a", "ab", "abc", "bc"], 2),
    ],
)
def test_memory_is_a_row_for_each_task_and_one_gradient(
    kind: str, only_a: int, steps: list[str], accumulate: int
) -> None:
    parts = Parts(kind, only_a)
    highest = encoders(lambda: parts.run(steps, accumulate))
    assert parts.rule.rows.numel() == 3 * parts.size
    assert highest == 3 + 1
    kept = parts.rule.rows.data_ptr()
    parts.run(["abc"])
    assert parts.rule.rows.data_ptr() == kept, "the rows are used again"


def test_memory_of_a_step_of_one_task_is_its_gradient() -> None:
    parts = Parts("pcgrad")
    assert encoders(lambda: parts.run(["b"])) == 1


@pytest.mark.parametrize("tasks", ["a", "b", "ab", "abc"])
def test_memory_of_gradients_that_were_taken_one_by_one(tasks: str) -> None:
    """As `task_graphs.py` does it: what only task a reaches is there once more, if others are beside it."""
    parts = Parts("pcgrad", only_a=3)
    parts.rule.lay_out()
    reached = []
    for row, task in enumerate(tasks):
        reached.append(parts.rule.take(row, parts.loss(task)))
        assert all(parameter.grad is None for parameter in parts.parameters)
    apart = 3 / 8 if len(tasks) > 1 else 0
    assert encoders(lambda: parts.rule.combine(list(tasks), np.array(reached))) == round(apart, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RULES)
def test_on_a_gpu_it_is_the_same(kind: str) -> None:
    model = Small("abc")
    expected = gradients_of(RULES[kind](model.shared(), "abc", seed=1), model)
    model.cuda()
    found = gradients_of(RULES[kind](model.shared(), "abc", seed=1), model)
    for name, value in expected.items():
        if value is not None:
            torch.testing.assert_close(found[name].cpu(), value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["pcgrad", "gradvac"])
def test_orders_follow_from_the_seed_and_the_step(kind: str) -> None:
    def draw(seed: int) -> list[list[list[int]]]:
        seen: list[list[list[int]]] = []
        rule = RULES[kind](Small("abcd").shared(), "abcd", seed=seed)
        rule.weigh = lambda gram, tasks, rng: (seen.append(random_orders(len(tasks), rng)), np.ones(len(gram)))[1]  # type: ignore[method-assign]
        for _ in range(6):
            rule(Small("abcd").losses())
        return seen

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len({str(orders) for orders in draw(1)}) > 1


# --- in a run -------------------------------------------------------------------------------------------------------

STILL = {"dropout": 0.0, "encoder_dropout": 0.0}


@pytest.fixture
def make(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> Callable[..., Trainer]:
    def make(rule: str, *, run: str = "run", kind: str = "all", model: Any = STILL, **training: Any) -> Trainer:
        recipe = small_recipe(
            tiny_encoder, sampler={"kind": kind}, model=model, training={"gradients": rule, "epochs": 1, **training}
        )
        return small_trainer(recipe, tmp_path / run, small_data)

    return make


def first_gradient(trainer: Trainer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def stop() -> None:
        found.update({name: p.grad.clone() for name, p in trainer._parameters() if p.grad is not None})
        raise Stopped

    trainer.optimizer.step = stop  # type: ignore[assignment, method-assign]
    with pytest.raises(Stopped):
        trainer.train()
    return found


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("weighting", ["sum", "mean", "uncertainty"])
def test_the_first_step_of_a_run(make: Callable[..., Trainer], kind: str, weighting: str) -> None:
    """The encoder's gradient is another than the plain one; heads and loss weights have the very same."""
    plain = first_gradient(make("sum", run="plain", loss_weighting=weighting))
    found = first_gradient(make(kind, loss_weighting=weighting))
    assert set(found) == set(plain)
    encoder = [name for name in plain if ".encoder." in name]
    for name in set(plain) - set(encoder):
        torch.testing.assert_close(found[name], plain[name], rtol=1e-4, atol=1e-6)
    assert any((found[name] - plain[name]).norm() > 1e-2 * plain[name].norm() for name in encoder)


def test_tasks_apart_have_the_gradient_of_the_tasks_together(make: Callable[..., Trainer]) -> None:
    """A surgery that cuts nothing."""
    plain = first_gradient(make("sum", run="plain"))
    trainer = make("pcgrad")
    trainer.work.rule.weigh = lambda gram, *_: np.ones(len(gram))  # type: ignore[attr-defined]
    found = first_gradient(trainer)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("sampler", ["all", "mixed"])
def test_it_trains(make: Callable[..., Trainer], kind: str, sampler: str) -> None:
    trainer = make(kind, kind=sampler, model={"common_layer": True}, mode="unfreeze", epochs=4)
    before = weights_of(trainer.model)
    trainer.train()
    after = weights_of(trainer.model)
    assert all(value.isfinite().all() for value in after.values())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "pooler" not in name}
    assert trainer.rows == 4 * 72


@pytest.mark.parametrize("kind", RULES)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    kind: str, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(
        tiny_encoder,
        sampler={"kind": "mixed"},
        training={
            "gradients": kind,
            "gradvac_beta": 0.5,
            "loss_weighting": "uncertainty",
            "accumulate": 2,
            "checkpoint_every": 3,
        },
    )
    train(recipe, out=tmp_path / "whole", data=small_data, device="cpu")
    for stop in (2, 4, 7, 11):
        with pytest.raises(Stopped):
            train(
                recipe, out=tmp_path / "run", data=small_data, device="cpu", resume=True, watcher=Listener(at_step=stop)
            )
    train(recipe, out=tmp_path / "run", data=small_data, device="cpu", resume=True)
    assert unlike(tmp_path / "run", tmp_path / "whole") == []


def test_the_recipe_chooses_the_rule(make: Callable[..., Trainer]) -> None:
    assert make("sum").work.rule is add_gradients
    rules = {kind: make(kind, gradvac_beta=0.2, cagrad_c=0.7).work.rule for kind in RULES}
    assert {kind: type(rule) for kind, rule in rules.items()} == RULES
    assert rules["gradvac"].beta == 0.2  # type: ignore[attr-defined]
    assert rules["cagrad"].c == 0.7  # type: ignore[attr-defined]


def test_everything_but_the_heads_is_shared(make: Callable[..., Trainer]) -> None:
    trainer = make("pcgrad", model={"common_layer": True})
    rule = make_rule(trainer.recipe, trainer.model)
    assert isinstance(rule, Surgery)
    names = {id(value): name for name, value in trainer.model.named_parameters()}
    assert {names[id(value)].split(".")[0] for value in rule.shared} == {"encoder", "common"}


TASK = {"train": "a.tsv", "dev": "a.tsv"}


@pytest.mark.parametrize(
    "kind", ["sequential", "round-robin", "proportional", "uniform", "power", "annealed", "weighted"]
)
def test_steps_of_one_task_are_refused(kind: str) -> None:
    raw = {"tasks": {"sst": TASK, "sts": TASK}, "sampler": {"kind": kind}, "training": {"gradients": "pcgrad"}}
    with pytest.raises(MinbertError) as found:
        parse_recipe(raw, "r.toml")
    assert str(found.value) == (
        f'r.toml: training.gradients is "pcgrad", with sampler.kind "{kind}"; '
        'expected several tasks in a step: two tasks or more, and sampler.kind "all" or "mixed"'
    )


@pytest.mark.parametrize("kind", ["all", "mixed"])
def test_steps_of_several_tasks_are_not(kind: str) -> None:
    raw = {"tasks": {"sst": TASK, "sts": TASK}, "sampler": {"kind": kind}, "training": {"gradients": "cagrad"}}
    assert parse_recipe(raw).training.gradients == "cagrad"


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"gradients": "pcgrad"}, "with one task, sst; expected several tasks in a step"),
        ({"gradients": "pcgard"}, 'did you mean "pcgrad"'),
        ({"cagrad_c": -0.1}, "training.cagrad_c is -0.1; expected 0 to 0.999999"),
        ({"cagrad_c": 1}, "training.cagrad_c is 1.0; expected 0 to 0.999999"),
        ({"gradvac_beta": 1.5}, "training.gradvac_beta is 1.5; expected 0 to 1"),
    ],
)
def test_what_is_wrong_is_said(training: dict[str, Any], message: str) -> None:
    with pytest.raises(MinbertError) as found:
        parse_recipe({"tasks": {"sst": TASK}, "sampler": {"kind": "all"}, "training": training})
    assert message in str(found.value)
