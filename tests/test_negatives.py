"""Negatives: how many, never a true pair, the rules for hard ones by hand, and the neighbours against all cosines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from minbert.data.negatives import FIRST, LAST, Nearest, draw_negatives, groups_of, known_pairs, pair_of
from minbert.data.raw import Examples
from minbert.data.tokenizer import Tokenizer
from minbert.model import neighbours
from minbert.model.multitask import encode_pooled
from minbert.model.neighbours import Neighbours, nearest_rows
from tests.models import PAIRS, TEXTS, make


def pairs(*rows: tuple[str, str]) -> Examples:
    texts, seconds = (list(column) for column in zip(*rows, strict=True))
    return Examples([f"row{number}" for number in range(len(rows))], texts, seconds, np.full(len(rows), 3.0))


MANY = pairs(*((f"question {number} about apples", f"answer {number} on pears") for number in range(60)))


def draw(examples: Examples, rate: float, *, seed: int = 1, nearest: Nearest | None = None) -> Examples:
    rng = np.random.default_rng(seed)
    return draw_negatives(examples, rate, label=0.0, known=known_pairs(examples), rng=rng, nearest=nearest)


@pytest.mark.parametrize(("rate", "rows"), [(1, 60), (0.5, 30), (2, 120), (0.01, 1), (1.25, 75)])
def test_as_many_as_asked_for(rate: float, rows: int) -> None:
    extra = draw(MANY, rate)
    assert len(extra) == len(extra.texts) == len(extra.pairs or []) == len(extra.ids) == rows
    assert extra.labels is not None and np.all(extra.labels == 0)
    each = [extra.texts.count(text) for text in MANY.texts]
    assert min(each) >= int(rate) and max(each) <= int(np.ceil(rate))


def test_no_pair_is_a_true_one_or_drawn_twice() -> None:
    # Eight texts in a ring: each has two neighbours, one as first and one as second text, and five others are left
    ring = pairs(*((f"text {number}", f"Text {(number + 1) % 8}!") for number in range(8)))
    extra = draw(ring, 2)
    drawn = [pair_of(*texts) for texts in zip(extra.texts, extra.pairs or [], strict=True)]
    assert not set(drawn) & known_pairs(ring) and len(set(drawn)) == len(drawn) == 16
    assert all(one != other for one, other in drawn)


def test_what_has_no_negative_gets_none() -> None:
    # "a" is paired with everything, so only "b" and "c" can be put together, in one order or the other
    star = pairs(("a", "b"), ("a", "c"), ("b", "a"), ("c", "a"))
    assert len(draw(star, 1)) == 1
    assert len(draw(pairs(("a", "b"), ("c", "d")), 1)) == 2


def test_paraphrases_of_paraphrases_are_not_negatives() -> None:
    # a = b, b = c and d = e; "f" is in no group, because its pair has a low label
    chain = pairs(("a", "b"), ("B", "c!"), ("d", "e"), ("a", "f"))
    chain = replace(chain, labels=np.array([5.0, 4.0, 4.5, 1.0]))
    groups = groups_of(chain, 4.0)
    assert groups["a"] == groups["b"] == groups["c"] != groups["d"] == groups["e"] and "f" not in groups
    for seed in range(20):
        rng = np.random.default_rng(seed)
        extra = draw_negatives(chain, 1, label=0, known=known_pairs(chain), rng=rng, groups=groups)
        assert pair_of("a", "c") not in known_pairs(extra) and len(extra) >= 2


def test_the_seed_decides() -> None:
    assert draw(MANY, 1).pairs == draw(MANY, 1).pairs != draw(MANY, 1, seed=2).pairs


class Ranked:
    """A pool in its own order, with cosines that fall from 1 by a hundredth a rank."""

    def __init__(self, step: float = 0.01) -> None:
        self.step = step

    def __call__(
        self,
        queries: Sequence[str],
        pool: Sequence[str],  # noqa: ARG002 - it stays in its order
        count: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        rows = np.tile(np.arange(count), (len(queries), 1))
        return rows, (1 - self.step * rows).astype(np.float32)


def test_hard_ones_come_from_the_middle_ranks() -> None:
    apart = pairs(*((f"one{number}", f"two{number}") for number in range(100)))
    extra = draw(apart, 1, nearest=Ranked())
    ranks = []
    for text, other in zip(extra.texts, extra.pairs or [], strict=True):
        own, found = int(text[3:]), int(other[3:])
        ranks.append(found + (found < own))  # counted from 1, without the true pair
    assert len(extra) == 100
    assert set(ranks) <= set(range(FIRST, LAST + 1)) and len(set(ranks)) > 30


def test_hard_ones_are_not_nearly_the_same() -> None:
    words = "red green blue white"
    close = pairs(*((f"{words} a{number}", f"{words} b{number}") for number in range(60)))
    assert len(draw(close, 1, nearest=Ranked())) == 0  # four of six words in common: too many
    apart = pairs(*((f"one{number}", f"two{number}") for number in range(60)))
    assert len(draw(apart, 1, nearest=Ranked(step=0.0001))) == 0  # all cosines above the bound


def test_nearest_rows_are_those_of_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    queries, pool = (rng.standard_normal((rows, 5)).astype(np.float32) for rows in (23, 40))
    products = queries @ pool.T
    expected = np.argsort(-products, axis=1)[:, :7]
    monkeypatch.setattr(neighbours, "BLOCK", 90)  # two queries at a time, and one at the end
    index, values = nearest_rows(torch.from_numpy(queries), torch.from_numpy(pool), 7)
    assert np.array_equal(index.numpy(), expected)
    assert values.numpy() == pytest.approx(np.take_along_axis(products, expected, 1), rel=1e-5)


def test_neighbours_by_mean_vectors_and_without_dropout(tiny_encoder: Path) -> None:
    tokenizer, model, _ = make(tiny_encoder)
    tokens = Tokenizer.load(tiny_encoder).encode([*TEXTS, *PAIRS], max_tokens=64)
    vectors = encode_pooled(model.runner, tokens, ["mean"])["mean"]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors[: len(TEXTS)] @ vectors[len(TEXTS) :].T
    model.train()
    index, found = Neighbours(model, tokenizer, max_tokens=64)(TEXTS, PAIRS, 99)
    assert model.training and np.array_equal(index, np.argsort(-cosines, axis=1))
    assert found == pytest.approx(-np.sort(-cosines, axis=1), abs=1e-5)
