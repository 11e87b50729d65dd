"""Heads: each against its formula written out in numpy, and on cases small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minbert.model.encoder import initialise
from minbert.model.heads import BUILDERS, BothOrders, build_head
from minbert.task_checks import check_task
from minbert.tasks import COSINES, HEADS, Task
from tests.models import shake

WIDTH, SCALE = 6, 3.0
Weights = dict[str, np.ndarray]
MANY = [name for name, row in HEADS.items() if not row.one_output]  # can say one number for each class
SYMMETRIC = ["absolute-difference", "interaction", "cosine", "projected-dot", "projected-cosine", "cosine-1d", "simcse"]
LEARNS = [
    name for name in HEADS if name not in ("cosine", "cosine-1d", "simcse")
]  # which have no weights, no slope, or weights in training only


def task_for(head: str, outputs: int = 1, **row: Any) -> Task:
    """A pair task whose head gives so many numbers."""
    if HEADS[head].only_contrastive:
        row["loss"] = "info-nce"
    if outputs == 1:
        return check_task(Task("t", "pair-regression", text2="b", head=head, **row))
    names = tuple("abcdefgh"[:outputs])
    return check_task(Task("t", "pair-classification", text2="b", classes=names, head=head, **row))


def head_for(head: str, outputs: int = 1, *, width: int = WIDTH, dropout: float = 0.0, **row: Any) -> nn.Module:
    torch.manual_seed(0)
    built = build_head(task_for(head, outputs, **row), width, dropout)
    shake(built, by=0.5)
    return built.eval()


def views_for(head: str, rows: int = 7, *, width: int = WIDTH, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((rows, width), generator=generator) for _ in HEADS[head].pair_views]


def set_weights(head: nn.Module, **weights: list[Any]) -> nn.Module:
    """Put numbers into a head by hand; a dot in a name is written as two underscores."""
    state = {name.replace("__", "."): torch.tensor(value, dtype=torch.float32) for name, value in weights.items()}
    head.load_state_dict(state)
    return head.eval()


def say(head: nn.Module, *views: list[list[float]]) -> list[list[float]]:
    with torch.no_grad():
        return head(*(torch.tensor(view) for view in views)).tolist()


# --- the formulas, once more ----------------------------------------------------------------------------------------


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def cosine(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    norms = np.sqrt((u * u).sum(1, keepdims=True)) * np.sqrt((v * v).sum(1, keepdims=True))
    return (u * v).sum(1, keepdims=True) / norms


def relu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, 0.0)


def branches(w: Weights, *views: np.ndarray) -> np.ndarray:
    return np.hstack([linear(w, f"branches.{number}", view) for number, view in enumerate(views)])


FORMULAS: dict[str, Callable[..., np.ndarray]] = {
    "linear": lambda w, x: linear(w, "out", x),
    "mlp": lambda w, x: linear(w, "out", relu(linear(w, "hidden", x))),
    "concat": lambda w, u, v: linear(w, "out", np.hstack([u, v])),
    "difference": lambda w, u, v: linear(w, "out", u - v),
    "absolute-difference": lambda w, u, v: linear(w, "out", abs(u - v)),
    "interaction": lambda w, u, v: linear(w, "out", relu(linear(w, "hidden", np.hstack([abs(u - v), u * v])))),
    "cosine": lambda _, u, v: SCALE * cosine(u, v),
    "projected-dot": lambda w, u, v: (linear(w, "projection", u) * linear(w, "projection", v)).sum(1, keepdims=True),
    "projected-cosine": lambda w, u, v: SCALE * relu(cosine(linear(w, "projection", u), linear(w, "projection", v))),
    "simcse": lambda _, u, v: SCALE * cosine(u, v),
    "cosine-1d": lambda w, u, v: SCALE * np.sign(linear(w, "projection", u) * linear(w, "projection", v)),
    "ph": lambda w, a, b: linear(w, "out", branches(w, a, b)),
    "dph": lambda w, a, b: linear(w, "out", branches(w, a, b, a - b)),
    "dpha": lambda w, a, b: linear(w, "out", np.tanh(branches(w, a, b, a - b))),
}
CASES = [(name, 1) for name in HEADS] + [(name, 4) for name in MANY]


def test_every_head_of_the_table_is_built_and_tested() -> None:
    assert set(BUILDERS) == set(HEADS) == set(FORMULAS)


@pytest.mark.parametrize(("name", "outputs"), CASES)
@pytest.mark.parametrize("hidden", [0, 3])
def test_a_head_computes_its_formula(name: str, outputs: int, hidden: int) -> None:
    head = head_for(name, outputs, hidden=hidden, scale=SCALE)
    views = views_for(name)
    weights = {key: value.double().numpy() for key, value in head.state_dict().items()}
    expected = FORMULAS[name](weights, *(view.double().numpy() for view in views))
    with torch.no_grad():
        found = head(*views)
    assert found.shape == expected.shape == (7, outputs)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "mlp"])
@pytest.mark.parametrize("outputs", [1, 5])
def test_heads_for_one_text_read_one_vector(name: str, outputs: int) -> None:
    classes = tuple("abcde"[:outputs]) if outputs > 1 else ()
    task = check_task(Task("t", "classification" if classes else "regression", classes=classes, head=name))
    assert task.views == ("first",)
    assert build_head(task, WIDTH, 0.0)(torch.zeros(3, WIDTH)).shape == (3, outputs)


WIDTHS = {
    "mlp": "hidden.weight",
    "interaction": "hidden.weight",
    "projected-dot": "projection.weight",
    "projected-cosine": "projection.weight",
}


@pytest.mark.parametrize(("name", "weight"), WIDTHS.items())
def test_the_width_of_a_hidden_layer_is_as_asked_or_the_encoders(name: str, weight: str) -> None:
    assert head_for(name, hidden=3).state_dict()[weight].shape[0] == 3
    assert head_for(name).state_dict()[weight].shape[0] == WIDTH


# --- worked by hand -------------------------------------------------------------------------------------------------


def test_linear_by_hand() -> None:
    head = set_weights(head_for("linear", width=2), out__weight=[[2, -1]], out__bias=[0.5])
    assert say(head, [[1.0, 3.0], [0.0, 0.0]]) == [[-0.5], [0.5]]


def test_concat_by_hand_has_the_first_text_first() -> None:
    head = set_weights(head_for("concat", width=2), out__weight=[[1, 10, 100, 1000]], out__bias=[0])
    assert say(head, [[1.0, 2.0]], [[3.0, 4.0]]) == [[1 + 20 + 300 + 4000]]
    assert say(head, [[3.0, 4.0]], [[1.0, 2.0]]) == [[3 + 40 + 100 + 2000]]


def test_difference_by_hand() -> None:
    head = set_weights(head_for("difference", width=2), out__weight=[[1, 10]], out__bias=[7])
    assert say(head, [[5.0, 1.0]], [[3.0, 4.0]]) == [[2 - 30 + 7]]
    assert say(head, [[3.0, 4.0]], [[5.0, 1.0]]) == [[-2 + 30 + 7]]


def test_interaction_by_hand() -> None:
    head = set_weights(
        head_for("interaction", width=2),
        hidden__weight=[[1, 1, 0, 0], [0, 0, 1, -10]],  # the sum of |u - v|; a product that is below 0 here
        hidden__bias=[0, 0],
        out__weight=[[2, 1]],
        out__bias=[1],
    )
    assert say(head, [[1.0, 2.0]], [[4.0, 1.0]]) == [[2 * (3 + 1) + 0 + 1]]


def test_projected_dot_by_hand() -> None:
    head = set_weights(head_for("projected-dot", width=2), projection__weight=[[1, 0], [0, 2]], projection__bias=[1, 0])
    assert say(head, [[1.0, 1.0]], [[2.0, 3.0]]) == [[(1 + 1) * (2 + 1) + 2 * 6]]


def test_cosine_by_hand() -> None:
    head = head_for("cosine", width=2)  # the scale is the top of the scores, 5
    assert say(head, [[3.0, 0.0], [1.0, 1.0], [1.0, 0.0]], [[2.0, 0.0], [-2.0, -2.0], [0.0, 9.0]]) == [
        [pytest.approx(5)],
        [pytest.approx(-5)],
        [pytest.approx(0)],
    ]


def both_orders(name: str) -> nn.Module:
    """Branch 0 reads the first number, branch 1 the second, branch 2 (where there is one) both; 1, 10, 100 tell them."""
    rows = {"branches__0": [[1, 0]], "branches__1": [[0, 1]], "branches__2": [[1, 1]]}
    used = list(rows)[: 2 if name == "ph" else 3]
    weights = {f"{key}__weight": rows[key] for key in used} | {f"{key}__bias": [0] for key in used}
    return set_weights(head_for(name, width=2), **weights, out__weight=[[1, 10, 100][: len(used)]], out__bias=[0.5])


def test_ph_has_a_branch_for_each_order() -> None:
    assert say(both_orders("ph"), [[2.0, 3.0]], [[5.0, 7.0]]) == [[2 + 10 * 7 + 0.5]]


def test_dph_adds_the_difference_of_the_orders() -> None:
    assert say(both_orders("dph"), [[2.0, 3.0]], [[5.0, 7.0]]) == [[2 + 10 * 7 + 100 * (2 - 5 + 3 - 7) + 0.5]]


def test_dpha_has_a_tanh_before_the_last_layer() -> None:
    expected = np.tanh(2) + 10 * np.tanh(7) + 100 * np.tanh(-7) + 0.5
    assert say(both_orders("dpha"), [[2.0, 3.0]], [[5.0, 7.0]]) == [[pytest.approx(expected, rel=1e-6)]]


@pytest.mark.parametrize("name", ["ph", "dph", "dpha"])
def test_the_last_layer_over_branches_is_as_large_as_torch_makes_it(name: str) -> None:
    """And the encoder hears of the task about as loudly as through one linear layer."""
    heads = [build_head(task_for(one), 384, 0.0) for one in ("linear", name)]
    found = []
    for seed in range(50):
        for head in heads:
            generator = torch.Generator().manual_seed(seed)
            initialise(head, generator)
            if isinstance(head, BothOrders):
                head.initialise(generator)
            views = [view.requires_grad_() for view in views_for(name, width=384)]
            head(*views[: 1 if head is heads[0] else 2]).sum().backward()
            found.append(torch.cat([view.grad for view in views if view.grad is not None]).norm().item())
    linear, branches = np.array(found).reshape(50, 2).T
    assert 0.3 < np.median(branches) / np.median(linear) < 3
    last = heads[1].get_submodule("out")
    assert isinstance(last, nn.Linear)
    torch.manual_seed(0)
    as_torch = np.concatenate([nn.Linear(last.in_features, 1).weight.detach().numpy().ravel() for _ in range(500)])
    ours = []
    for _ in range(500):
        heads[1].initialise(None)  # type: ignore[operator]
        ours.append(last.weight.detach().numpy().ravel().copy())
    assert np.concatenate(ours).std() == pytest.approx(as_torch.std(), rel=0.1)
    assert max(map(np.max, ours)) <= last.in_features**-0.5
    assert not last.bias.any(), "behind tanhs a drawn one can put the labels out of reach"


@pytest.mark.parametrize("outputs", [1, 3])
def test_branches_have_a_logit_for_each_class(outputs: int) -> None:
    shapes = {
        name: {
            key: tuple(value.shape) for key, value in head_for(name, outputs).state_dict().items() if "weight" in key
        }
        for name in ("ph", "dph", "dpha")
    }
    branch = {f"branches.{number}.weight": (outputs, WIDTH) for number in range(3)}
    three = branch | {"out.weight": (outputs, 3 * outputs)}
    two = {key: shape for key, shape in branch.items() if "2" not in key} | {"out.weight": (outputs, 2 * outputs)}
    assert shapes == {"ph": two, "dph": three, "dpha": three}


def test_dpha_differs_from_dph_with_the_same_weights() -> None:
    plain, active = head_for("dph", 3), head_for("dpha", 3)
    active.load_state_dict(plain.state_dict())
    views = views_for("dph")
    assert (plain(*views) - active(*views)).abs().max() > 0.1


# --- what a head can and cannot say ---------------------------------------------------------------------------------

numbers = st.floats(-10, 10, width=32).map(lambda value: value if abs(value) > 0.01 else 1.0)
vectors = st.lists(st.lists(numbers, min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=5).map(torch.tensor)


@settings(max_examples=40, deadline=None)
@given(u=vectors, scale=st.sampled_from([1.0, 5.0]))
def test_cosine_of_one_number_is_the_scale_or_minus_it(u: torch.Tensor, scale: float) -> None:
    head = head_for("cosine-1d", scale=scale)
    found = head(u, u.flip(0, 1)).detach()
    np.testing.assert_allclose(found.abs().numpy(), scale, rtol=1e-4)


def test_cosine_of_one_number_says_both() -> None:
    found = head_for("cosine-1d")(*views_for("cosine-1d", 50)).detach().flatten()
    assert {round(float(value), 4) for value in found} == {-5.0, 5.0}


@settings(max_examples=40, deadline=None)
@given(u=vectors, scale=st.sampled_from([1.0, 5.0]))
def test_projected_cosine_is_never_negative_nor_above_the_scale(u: torch.Tensor, scale: float) -> None:
    head = head_for("projected-cosine", scale=scale)
    found = head(u, -u).detach()
    assert found.min() >= 0
    assert found.max() <= scale * 1.0001
    assert head(u, u).detach().numpy() == pytest.approx(scale, rel=1e-4)


@pytest.mark.parametrize("name", COSINES)
def test_a_cosines_scale_is_the_top_of_the_scores_or_as_asked(name: str) -> None:
    u = torch.ones(1, WIDTH)
    assert head_for(name, high=4.0)(u, u).item() == pytest.approx(4)
    assert head_for(name, high=4.0, scale=20.0)(u, u).item() == pytest.approx(20)


@pytest.mark.parametrize("name", [name for name in HEADS if len(HEADS[name].pair_views) == 2])
def test_which_heads_care_about_the_order(name: str) -> None:
    head = head_for(name)
    first, second = views_for(name)
    change = (head(first, second) - head(second, first)).abs().max().item()
    assert change < 1e-5 if name in SYMMETRIC else change > 0.1


@pytest.mark.parametrize("name", [name for name in HEADS if name != "simcse"])  # whose noise is the encoder's
def test_dropout_is_off_in_eval_and_on_in_training(name: str) -> None:
    head = head_for(name, dropout=0.5)
    views = views_for(name, 20)
    plain = head_for(name)(*views)
    assert torch.equal(head(*views), plain)
    head.train()
    torch.manual_seed(1)
    assert not torch.equal(head(*views), head(*views))


@pytest.mark.parametrize("name", [name for name in HEADS if name != "simcse"])
@pytest.mark.parametrize(("own", "models"), [(0.0, 0.5), (0.5, 0.0)])
def test_a_task_may_have_a_dropout_of_its_own(name: str, own: float, models: float) -> None:
    head, views = build_head(task_for(name, dropout=own), WIDTH, models), views_for(name, 20)
    shake(head, by=0.5)
    head.train()
    assert torch.equal(head(*views), head(*views)) == (own == 0)


@pytest.mark.parametrize("name", LEARNS)
def test_a_gradient_reaches_every_weight_and_every_view(name: str) -> None:
    head = head_for(name, 3 if name in MANY else 1)
    views = [view.requires_grad_() for view in views_for(name, 30)]
    head(*views).square().sum().backward()
    for part, weight in [*head.named_parameters(), *((f"view {number}", view) for number, view in enumerate(views))]:
        assert weight.grad is not None, part
        assert weight.grad.abs().sum() > 1e-3, part


def test_cosine_teaches_the_encoder_alone() -> None:
    head = head_for("cosine")
    views = [view.requires_grad_() for view in views_for("cosine")]
    head(*views).square().sum().backward()
    assert not list(head.parameters())
    assert all(view.grad is not None and view.grad.abs().sum() > 1e-3 for view in views)


def test_cosine_of_one_number_teaches_nothing() -> None:
    """Why that experiment failed: its answer is flat but for the jump between -1 and 1."""
    head = head_for("cosine-1d")
    head(*views_for("cosine-1d")).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().max() < 1e-4 for weight in head.parameters())
