"""CAGrad's factors from the tasks' dot products: a small convex problem (Liu et al. 2021, arXiv:2110.14048).

weights = avert_conflicts(gram, c=0.5)      # (tasks,), of each task's gradient in the result
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

SWEEPS = 200  # of weight between pairs, at most
GAP = 1e-9  # what the mixture may be off its best, in squares of the longest gradient


def avert_conflicts(gram: NDArray[np.float64], c: float) -> NDArray[np.float64]:
    """CAGrad's factors, (tasks,): d = g0 + c |g0| / |gw| gw, where gw is the tasks' mixture that the dual finds.

    A task without a gradient is left out: no direction changes it, but as the worst off it would decide the mixture.
    """
    tasks, active = len(gram), gram.diagonal() > 0
    if not active.all():
        weights = np.ones(tasks)
        if active.any():
            weights[active] = avert_conflicts(gram[np.ix_(active, active)], c)
        return weights
    mean_length = math.sqrt(max(0.0, gram.mean()))
    mixture = solve_dual(gram, c * mean_length)
    # A mixture much shorter than what it is made of is the rounding of dot products: it fades out.
    apart = float(mixture @ np.sqrt(np.diag(gram)))
    length = max(math.sqrt(max(0.0, float(mixture @ gram @ mixture))), 1e-3 * apart)
    return 1 + (tasks * c * mean_length / length * mixture if length > 0 else np.zeros(tasks))


def solve_dual(gram: NDArray[np.float64], radius: float) -> NDArray[np.float64]:
    """The mixture w, on the simplex, with the least gw . g0 + radius |gw|.

    Moving weight in pairs is exact for two tasks, and nearly always soon there for more. But where gradients of three
    tasks or more nearly cancel out, |gw| has a kink, on which no pair can move though three tasks together could. There
    the duality gap stays open, and a method without kinks takes over.
    """
    mixture = _move_pairs(gram, radius)
    if len(gram) > 2 and duality_gap(gram, radius, mixture) > GAP * gram.diagonal().max():
        mixture = min(mixture, _follow_path(gram, radius), key=lambda found: _dual(gram, radius, found))
    return mixture


def duality_gap(gram: NDArray[np.float64], radius: float, mixture: NDArray[np.float64]) -> float:
    """How much less than this mixture's the least may be, at most: the difference to the worst-off task's dot product
    with the direction, which is never above the least."""
    products = gram @ mixture
    length = math.sqrt(max(0.0, float(mixture @ products)))
    slopes = gram.mean(axis=1) + (radius / length * products if length > 0 else 0)
    return float(mixture @ slopes - slopes.min())


def _dual(gram: NDArray[np.float64], radius: float, mixture: NDArray[np.float64]) -> float:
    return float(mixture @ gram.mean(axis=1)) + radius * math.sqrt(max(0.0, float(mixture @ gram @ mixture)))


def _move_pairs(gram: NDArray[np.float64], radius: float) -> NDArray[np.float64]:
    """Weight is moved between two tasks at a time to where it is best, which has a closed form, until nothing moves: no
    rate to choose (the authors call scipy's SLSQP)."""
    mixture = np.full(len(gram), 1 / len(gram))
    to_mean = gram.mean(axis=1)
    for _ in range(SWEEPS):
        moved = 0.0
        for one, other in combinations(range(len(gram)), 2):
            # Along delta from `other` to `one`: slope * delta + radius * sqrt(|gw + delta * (g_one - g_other)|^2)
            slope = to_mean[one] - to_mean[other]
            distance = gram[one, one] + gram[other, other] - 2 * gram[one, other]  # |g_one - g_other|^2
            if distance <= 0:  # the same gradient twice
                continue
            products = gram @ mixture
            nearest = (products[one] - products[other]) / distance  # how far gw is from its shortest, along the line
            shortest = max(0.0, mixture @ products / distance - nearest**2)
            steepest = radius**2 * distance - slope**2
            if steepest > 0:
                delta = -slope * math.sqrt(shortest / steepest) - nearest
            else:
                delta = -math.copysign(1.0, slope) if slope else 0.0
            delta = min(max(delta, -mixture[one]), mixture[other])
            mixture[one] += delta
            mixture[other] -= delta
            moved = max(moved, abs(delta))
        if moved < 1e-12:
            break
    return mixture


def _follow_path(gram: NDArray[np.float64], radius: float) -> NDArray[np.float64]:
    """The same by an interior-point method, for any number of tasks and any dot products: some 60 Newton steps.

    With t for |gw|, minimize gw . g0 + radius t - mu (log(t^2 - |gw|^2) + sum(log w)) for ever smaller mu. The best t is
    (mu + root) / radius, root^2 = mu^2 + radius^2 |gw|^2. Steps damped by 1 / (1 + decrement) never leave the simplex
    (Nesterov 2004, section 4.1.5), and at the end the value is within (tasks + 2) mu of the least.
    """
    tasks, scale = len(gram), gram.diagonal().max()
    values, axes = np.linalg.eigh(gram / scale)
    vectors = axes * np.sqrt(values.clip(min=0))  # (tasks, tasks), with these dot products
    mean, radius = vectors.mean(axis=0), radius / math.sqrt(scale)
    mixture, mu = np.full(tasks, 1 / tasks), 1.0
    while mu > 1e-3 * GAP:
        mu /= 8
        for _ in range(50):  # it takes a few
            mixed = mixture @ vectors
            root = math.sqrt(mu**2 + radius**2 * (mixed @ mixed))
            pull = radius**2 / (mu + root)
            # The step is in units of the weights, so that those near 0 do no harm, and within the plane where their sum stays
            plane = np.linalg.svd(mixture[None])[2][1:]
            slope = plane @ (mixture * (vectors @ (mean + pull * mixed)) - mu)
            # Its second derivative is pull * (1 - pull / root * mixed mixed^T), between the vectors. The root of that, since
            # the smallest curvature would be lost beside the largest; 1 - pull / root * |mixed|^2 is mu / root
            shrink = pull / root / (1 + math.sqrt(mu / root))
            scaled = plane * mixture @ vectors
            bend = math.sqrt(pull) * (scaled - shrink * np.outer(scaled @ mixed, mixed))
            turn, sizes, _ = np.linalg.svd(bend)
            along, curvature = turn.T @ slope, sizes**2 + mu
            decrement = math.sqrt(along**2 @ (1 / curvature) / mu)
            mixture = mixture * (1 - (along / curvature) @ turn.T @ plane / (1 + decrement))
            mixture /= mixture.sum()
            if decrement < 0.1:
                break
    return mixture
