"""AdamW and RAdam against torch.optim and against formulas written out; the parameter groups against a small model."""

from __future__ import annotations

import copy
import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from minbert.training import optimizers
from minbert.training.optimizers import AdamW, RAdam, parameter_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

SHAPES = [(7, 5), (5,), (), (3, 2, 4)]
SETTINGS: list[dict[str, Any]] = [
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    {"lr": 2e-5, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.0},
    {"lr": 1e-3, "betas": (0.0, 0.5), "eps": 1e-8, "weight_decay": 0.01},
]


def torch_adamw(params: list[nn.Parameter], **kwargs: Any) -> Optimizer:
    return torch.optim.AdamW(params, foreach=True, **kwargs)


def torch_radam(params: list[nn.Parameter], **kwargs: Any) -> Optimizer:
    return torch.optim.RAdam(params, foreach=False, decoupled_weight_decay=True, **kwargs)


Ours = type[AdamW] | type[RAdam]
PEERS = [pytest.param(AdamW, torch_adamw, id="AdamW"), pytest.param(RAdam, torch_radam, id="RAdam")]


def make_params(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(0.1 * torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], generator: torch.Generator) -> None:
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def copy_gradients(source: list[nn.Parameter], target: list[nn.Parameter]) -> None:
    for p, q in zip(source, target, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()


def largest_difference(left: list[nn.Parameter], right: list[nn.Parameter]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that the small tensors of these tests are sliced as large ones are."""
    monkeypatch.setattr(optimizers, "BLOCK", 8)


# torch.optim is the authority


@pytest.mark.parity
@pytest.mark.parametrize(("ours", "theirs"), PEERS)
@pytest.mark.parametrize("hyper", SETTINGS, ids=lambda hyper: f"betas{hyper['betas']}")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_a_thousand_steps_as_torch(
    ours: Ours, theirs: Callable[..., Optimizer], hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    mine, reference = make_params(dtype), make_params(dtype)
    pair = ours(mine, **hyper), theirs(reference, **hyper)
    generator = torch.Generator().manual_seed(1)
    for step in range(1000):
        set_gradients(mine, generator)
        copy_gradients(mine, reference)
        for optimizer in pair:
            optimizer.param_groups[0]["lr"] = hyper["lr"] * (1 - step / 1000)  # a schedule, changed from outside
            optimizer.step()
        if step < 10 or step % 50 == 49:
            assert largest_difference(mine, reference) <= (1e-12 if dtype is torch.float64 else 1e-6), step


@pytest.mark.parity
@pytest.mark.parametrize(("ours", "theirs"), PEERS)
@pytest.mark.usefixtures("small_blocks")
def test_training_a_network_in_blocks_as_torch(ours: Ours, theirs: Callable[..., Optimizer]) -> None:
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1)).double()
    reference = copy.deepcopy(mine)
    inputs = torch.randn(32, 6, dtype=torch.float64)
    targets = inputs.prod(dim=1, keepdim=True)
    pairs = [
        (model, make(model.parameters(), **{**SETTINGS[0], "lr": 0.01}))
        for model, make in ((mine, ours), (reference, theirs))
    ]
    losses = []
    for _ in range(300):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert largest_difference(list(mine.parameters()), list(reference.parameters())) <= 1e-6


@pytest.mark.parity
@pytest.mark.parametrize(("ours", "theirs"), PEERS)
def test_a_torch_checkpoint_goes_on_here(ours: Ours, theirs: Callable[..., Optimizer]) -> None:
    reference = make_params()
    reference_optimizer = theirs(reference, **SETTINGS[0])
    generator = torch.Generator().manual_seed(2)
    for _ in range(10):
        set_gradients(reference, generator)
        reference_optimizer.step()
    mine = copy.deepcopy(reference)
    optimizer = ours(mine)
    optimizer.load_state_dict(copy.deepcopy(reference_optimizer.state_dict()))  # torch loads tensors without a copy
    for p, q in zip(mine, reference, strict=True):
        p.grad = q.grad = torch.ones_like(p)
    optimizer.step()
    reference_optimizer.step()
    assert largest_difference(mine, reference) <= 1e-12
    assert optimizer.state[mine[0]]["step"] == 11


# The formulas, written out for one number


def literal_adamw(
    p: float, grads: list[float | None], *, lr: float, betas: tuple[float, float], eps: float, wd: float, mode: str
) -> float:
    m = v = 0.0
    t = 0
    beta1, beta2 = betas
    for g in grads:
        if g is None:
            continue
        t += 1
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        if mode == "course":
            alpha = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
            p = p - alpha * m / (math.sqrt(v) + eps)
            p = p - lr * wd * p
        elif mode == "none":
            p = p - lr * wd * p - lr * m / (math.sqrt(v) + eps)
        else:
            m_hat = m / (1 - beta1**t)
            v_hat = v / (1 - beta2**t)
            p = p - lr * wd * p - lr * m_hat / (math.sqrt(v_hat) + eps)
    return p


@given(
    grads=st.lists(st.none() | st.floats(-10, 10, allow_subnormal=False), min_size=1, max_size=30),
    mode=st.sampled_from(["torch", "course", "none"]),
    betas=st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.9, 0.99, 0.999])),
    eps=st.sampled_from([1e-8, 1e-3]),
    wd=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=100, deadline=None)
def test_adamw_is_its_formula(
    grads: list[float | None], mode: Any, betas: tuple[float, float], eps: float, wd: float
) -> None:
    p = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))
    optimizer = AdamW([p], lr=0.05, betas=betas, eps=eps, weight_decay=wd, bias_correction=mode)
    for g in grads:
        p.grad = None if g is None else torch.full_like(p, g)
        optimizer.step()
    expected = literal_adamw(0.7, grads, lr=0.05, betas=betas, eps=eps, wd=wd, mode=mode)
    assert p.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_three_corrections_of_adamw_differ() -> None:
    results = []
    for mode in ("torch", "course", "none"):
        p = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        p.grad = torch.ones_like(p)
        AdamW([p], lr=0.1, eps=0.1, weight_decay=0.5, bias_correction=mode).step()
        results.append(p.item())
    root = math.sqrt(0.001)
    assert results == pytest.approx(
        [
            1 * 0.95 - 0.1 * 1 / (1 + 0.1),
            (1 - 0.1 * root / 0.1 * 0.1 / (root + 0.1)) * 0.95,
            1 * 0.95 - 0.1 * 0.1 / (root + 0.1),
        ]
    )


def test_radam_switches_from_momentum_to_the_rectified_step() -> None:
    """Constant gradients keep m_hat at g and v_hat at g^2, so each move is the step size itself."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = RAdam([p], lr=1.0, eps=0.0, betas=(0.9, 0.999))
    moves = []
    for _ in range(8):
        before = p.item()
        p.grad = torch.full_like(p, 3.0)
        optimizer.step()
        moves.append(before - p.item())
    assert moves[:5] == pytest.approx([3.0] * 5)  # rho_5 = 4.996: still lr * m_hat
    rho_inf = 1999.0
    for t in (6, 7, 8):
        rho = rho_inf - 2 * t * 0.999**t / (1 - 0.999**t)
        assert rho > 5
        rectification = math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
        assert moves[t - 1] == pytest.approx(rectification)
    assert moves[5] < moves[6] < moves[7] < 1


def test_radam_course_moves_the_decay_behind_the_step() -> None:
    before, after = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    for p in (before, after):
        p.grad = torch.full_like(p, 2.0)
    RAdam([before], lr=0.1, weight_decay=0.5).step()
    RAdam([after], lr=0.1, weight_decay=0.5, bias_correction="course").step()
    assert before.item() == pytest.approx(1 * 0.95 - 0.2)
    assert after.item() == pytest.approx((1 - 0.2) * 0.95)


# What an optimizer promises


@pytest.mark.parametrize("ours", [AdamW, RAdam])
@pytest.mark.parametrize("mode", ["torch", "course"])
def test_state_dict_round_trip_is_bit_exact(ours: Ours, mode: Any, tmp_path: Any) -> None:
    params = make_params(torch.float32)
    optimizer = ours(params, **SETTINGS[0], bias_correction=mode)
    generator = torch.Generator().manual_seed(3)
    for _ in range(7):
        set_gradients(params, generator)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed = copy.deepcopy(params)
    resumed_optimizer = ours(resumed, lr=123.0)
    resumed_optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert resumed_optimizer.param_groups[0]["bias_correction"] == mode
    for _ in range(20):
        set_gradients(params, generator)
        copy_gradients(params, resumed)
        optimizer.step()
        resumed_optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, resumed, strict=True))
    for p, q in zip(params, resumed, strict=True):
        assert optimizer.state[p]["step"] == resumed_optimizer.state[q]["step"] == 27
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][name], resumed_optimizer.state[q][name])


@pytest.mark.parity
@pytest.mark.parametrize(("ours", "theirs"), PEERS)
def test_each_parameter_counts_its_own_steps(ours: Ours, theirs: Callable[..., Optimizer]) -> None:
    mine, reference = make_params(), make_params()
    pair = ours(mine, **SETTINGS[0]), theirs(reference, **SETTINGS[0])
    generator = torch.Generator().manual_seed(4)
    for step in range(30):
        set_gradients(mine, generator)
        if step % 3:
            mine[0].grad = None
        if step < 25:
            mine[1].grad = None
        copy_gradients(mine, reference)
        for optimizer in pair:
            optimizer.step()
    assert [pair[0].state[p]["step"] for p in mine] == [10, 5, 30, 30]
    assert largest_difference(mine, reference) <= 1e-12


def test_no_gradient_no_change_and_no_state() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], weight_decay=0.5)
    optimizer.step()
    assert torch.equal(p, torch.ones(3))
    assert not optimizer.state


@pytest.mark.parametrize("ours", [AdamW, RAdam])
def test_zero_gradients_leave_only_the_decay(ours: Ours) -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = ours([p], lr=0.1, weight_decay=0.5)
    for _ in range(10):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert p.tolist() == pytest.approx([0.95**10] * 3)


def test_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = AdamW([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0  # type: ignore[arg-type, attr-defined]
    assert p.item() == pytest.approx(1.9)


def test_groups_keep_their_own_settings() -> None:
    slow, fast = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    groups: list[dict[str, Any]] = [{"params": [slow], "lr": 0.01}, {"params": [fast], "bias_correction": "none"}]
    optimizer = AdamW(groups, lr=0.1, eps=0)
    for p in (slow, fast):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert slow.tolist() == pytest.approx([-0.01] * 2)
    assert fast.tolist() == pytest.approx([-0.1 * 0.1 / math.sqrt(0.001)] * 2)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_do_not_need_contiguous_tensors() -> None:
    """A parameter that is not contiguous is never fused; it is compared with one by hand."""
    values = torch.arange(60, dtype=torch.float64).reshape(5, 12)
    p, q = nn.Parameter(values.clone().t()), nn.Parameter(values.t().contiguous())
    assert not p.is_contiguous()
    gradient = torch.randn(12, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    p.grad, q.grad = gradient, gradient.t().contiguous().t()
    for parameter in (p, q):
        AdamW([parameter], weight_decay=0.1, fused=False).step()
    assert torch.equal(p, q)


# The fused step


def clipped(params: list[nn.Parameter], limit: float) -> float:
    """torch's own clipping; returns the norm before it."""
    return float(nn.utils.clip_grad_norm_(params, limit))


@pytest.mark.parity
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_fused_steps_do_not_need_contiguous_gradients(clip: float) -> None:
    """The kernel walks parameter, gradient and moments alike: a gradient laid out otherwise must be copied first."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(12, 5, generator=generator)
    mine, reference = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    optimizer = AdamW([mine], weight_decay=0.1)
    optimizer.clip = clip
    authority = torch.optim.AdamW([reference], weight_decay=0.1, foreach=True)
    for step in range(5):
        gradient = torch.randn(5, 12, generator=generator)
        mine.grad, reference.grad = gradient.clone().t(), gradient.t().contiguous()
        assert not mine.grad.is_contiguous()
        if step == 3:
            mine.grad = reference.grad[:1, :1].clone().expand(12, 5)  # every element the same number in memory
            reference.grad = mine.grad.contiguous()
        if clip:
            assert clipped([reference], clip) > clip
        optimizer.step()
        authority.step()
    assert isinstance(optimizer.state[mine]["step"], Tensor), "this was the fused step"
    torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(optimizer.state[mine][name], authority.state[reference][name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["torch", "course", "none"])
def test_only_torchs_formula_over_contiguous_tensors_is_fused(mode: Any) -> None:
    whole, turned = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2, 3).t())
    optimizer = AdamW([whole, turned], bias_correction=mode)
    for p in (whole, turned):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert isinstance(optimizer.state[whole]["step"], Tensor) is (mode == "torch")
    assert optimizer.state[turned]["step"] == 1
    torch.testing.assert_close(whole, turned)
    assert not optimizer.capturable, "a CUDA graph holds only what a GPU does by itself"


@pytest.mark.parity
@pytest.mark.parametrize("clip", [0.01, 0.7, 1e6])
@pytest.mark.parametrize(("ours", "theirs"), PEERS)
@pytest.mark.parametrize(("fused", "dtype"), [(True, torch.float32), (True, torch.float64), (False, torch.float64)])
def test_clipping_in_the_step_is_torchs(
    ours: Ours, theirs: Callable[..., Optimizer], fused: bool, dtype: torch.dtype, clip: float
) -> None:
    mine, reference = make_params(dtype), make_params(dtype)
    pair = ours(mine, **SETTINGS[0], fused=fused), theirs(reference, **SETTINGS[0])
    pair[0].clip = clip
    generator = torch.Generator().manual_seed(8)
    for _ in range(20):
        set_gradients(mine, generator)
        copy_gradients(mine, reference)
        assert clipped(reference, clip) > 0.7
        for optimizer in pair:
            optimizer.step()
    # What gradients are divided by is a float32 for the fused kernel, whatever they are.
    near = {"rtol": 1e-5, "atol": 1e-7} if fused else {"rtol": 1e-9, "atol": 1e-12}
    assert largest_difference(mine, reference) <= (1e-6 if fused else 1e-12)
    for p, q in zip(mine, reference, strict=True):
        torch.testing.assert_close(pair[0].state[p]["exp_avg"], pair[1].state[q]["exp_avg"], **near)


@pytest.mark.parity
def test_clipping_counts_fused_and_other_steps_together() -> None:
    mine, reference = make_params(), make_params()
    groups: list[dict[str, Any]] = [{"params": mine[:2]}, {"params": mine[2:], "bias_correction": "none"}]
    plain: list[dict[str, Any]] = [{"params": reference[:2]}, {"params": reference[2:], "bias_correction": "none"}]
    pair = AdamW(groups, lr=0.1), AdamW(plain, lr=0.1, fused=False)
    pair[0].clip = 0.5
    set_gradients(mine, torch.Generator().manual_seed(9))
    copy_gradients(mine, reference)
    assert clipped(reference, 0.5) > 0.5
    for optimizer in pair:
        optimizer.step()
    for p, q in zip(mine, reference, strict=True):
        torch.testing.assert_close(pair[0].state[p]["exp_avg"], pair[1].state[q]["exp_avg"], rtol=1e-6, atol=1e-9)
    assert largest_difference(mine, reference) <= 1e-6


def test_a_loaded_state_is_not_reached_through_old_addresses() -> None:
    """The GPU's kernel keeps tables of where the moments are; loading puts others in their place."""
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer._kernel_tables, optimizer._decays = object(), torch.zeros(1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not hasattr(optimizer, "_kernel_tables")
    assert not hasattr(optimizer, "_decays")


@pytest.mark.parity
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_a_loss_scale_is_divided_out_and_an_overflow_moves_nothing(clip: float) -> None:
    mine, reference = make_params(torch.float32), make_params(torch.float32)
    optimizer = AdamW(mine, **SETTINGS[0])
    authority = torch.optim.AdamW(reference, **SETTINGS[0], foreach=True)
    optimizer.clip, optimizer.loss_scale = clip, torch.tensor(1024.0)
    generator = torch.Generator().manual_seed(10)
    for step in range(12):
        set_gradients(reference, generator)
        for p, q in zip(mine, reference, strict=True):
            assert q.grad is not None
            p.grad = q.grad * 1024
        if step % 4 == 2:
            assert mine[1].grad is not None
            mine[1].grad[2] = math.inf if step == 2 else math.nan
            before = copy.deepcopy([mine, list(optimizer.state.values())])
            optimizer.step()
            torch.testing.assert_close([mine, list(optimizer.state.values())], before, rtol=0, atol=0)
            assert optimizer.found_inf is not None
            assert optimizer.found_inf.item() == 1
            continue
        if clip:
            assert clipped(reference, clip) > clip
        authority.step()
        optimizer.step()
        assert optimizer.found_inf is not None
        assert optimizer.found_inf.item() == 0
    assert largest_difference(mine, reference) <= 1e-6
    assert {float(optimizer.state[p]["step"]) for p in mine} == {9.0}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": -1.0}, r"lr is -1.0; expected a finite number of at least 0"),
        ({"lr": math.nan}, r"lr is nan; expected"),
        ({"lr": torch.tensor(0.1)}, r"lr is tensor\(0\.1"),
        ({"eps": -1e-8}, r"eps is -1e-08; expected"),
        ({"weight_decay": math.inf}, r"weight_decay is inf; expected"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0\.9, 1\.0\); expected two numbers from 0 to below 1"),
        ({"betas": (0.9,)}, r"betas is \(0\.9,\); expected two"),
        ({"bias_correction": "keras"}, r"bias_correction of AdamW is 'keras'; expected \"torch\" or \"course\" or"),
    ],
)
def test_wrong_settings_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW([nn.Parameter(torch.ones(1))], **setting)
    optimizer = AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **setting})
    assert len(optimizer.param_groups) == 1


def test_radam_refuses_to_go_uncorrected() -> None:
    with pytest.raises(ValueError, match=r"bias_correction of RAdam is 'none'; expected \"torch\" or \"course\"$"):
        RAdam([nn.Parameter(torch.ones(1))], bias_correction="none")


def test_sparse_and_complex_gradients_are_refused_before_anything_moves() -> None:
    dense = nn.Parameter(torch.ones(2))
    dense.grad = torch.ones(2)
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"gradient is torch\.sparse_coo of torch\.float32 .* shape \(4, 2\)"):
        AdamW([dense, embedding.weight]).step()
    wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    wave.grad = torch.ones_like(wave)
    with pytest.raises(ValueError, match=r"torch\.complex64 .*RAdam expects dense real gradients"):
        RAdam([dense, wave]).step()
    assert torch.equal(dense, torch.ones(2))


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("ours", [AdamW, RAdam])
def test_cuda_steps_without_waiting_and_agrees_with_the_cpu(ours: Ours, clip: float) -> None:
    """AdamW's kernel reads rates and addresses on the device: the rates are given there, and the first step, which
    writes the addresses down, may wait.
    """
    on_cpu = make_params(torch.float32)
    on_gpu = [nn.Parameter(p.detach().cuda()) for p in on_cpu]
    pairs = [(params, ours(params, **SETTINGS[0])) for params in (on_cpu, on_gpu)]
    for _, optimizer in pairs:
        optimizer.clip = clip
    if ours is AdamW:
        pairs[1][1].rates = torch.tensor([SETTINGS[0]["lr"]]).cuda()
    generator = torch.Generator().manual_seed(6)
    for step in range(20):
        set_gradients(on_cpu, generator)
        for p, q in zip(on_cpu, on_gpu, strict=True):
            assert p.grad is not None
            q.grad = p.grad.cuda() if q.grad is None else q.grad.copy_(p.grad)
        pairs[0][1].step()
        torch.cuda.set_sync_debug_mode("error" if step or ours is RAdam else "default")
        try:
            pairs[1][1].step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert largest_difference(on_cpu, [nn.Parameter(q.detach().cpu()) for q in on_gpu]) <= 1e-6


# Parameter groups


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
        self.feed_forward = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "norm": nn.LayerNorm(4)})


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = {"tokens": nn.Embedding(9, 4), "positions": nn.Embedding(5, 4), "segments": nn.Embedding(2, 4)}
        self.embeddings = nn.ModuleDict({**tables, "norm": nn.LayerNorm(4)})
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.relative_bias = nn.Embedding(32, 2)
        self.pooler = nn.Linear(4, 4)


class Multitask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        # "layers.0" below a head is no encoder layer
        self.heads = nn.ModuleDict({"sentiment": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 5)])})})


def group_of(model: nn.Module, groups: list[dict[str, Any]], name: str) -> dict[str, Any]:
    wanted = model.get_parameter(name)
    (found,) = [group for group in groups if any(p is wanted for p in group["params"])]
    return found


def test_groups_split_by_decay_and_name_themselves() -> None:
    model = Multitask()
    groups = parameter_groups(model, lr=1e-5, weight_decay=0.01)
    assert [g["name"] for g in groups] == ["encoder", "encoder (no decay)", "heads", "heads (no decay)"]
    assert [g["weight_decay"] for g in groups] == [0.01, 0.0, 0.01, 0.0]
    assert {g["lr"] for g in groups} == {1e-5}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        exempt = parameter.ndim < 2 or "relative_bias" in name
        assert group_of(model, groups, name)["weight_decay"] == (0.0 if exempt else 0.01), name
    AdamW(groups)  # torch accepts them


@pytest.mark.parametrize("prefix", ["encoder.", ""])
def test_layers_learn_slower_the_deeper_they_lie(prefix: str) -> None:
    model: nn.Module = Multitask() if prefix else Encoder()
    groups = parameter_groups(model, lr=1.0, weight_decay=0.01, layer_decay=0.5)
    expected = {
        "embeddings.tokens.weight": 0.5**4,
        "embeddings.norm.bias": 0.5**4,
        "layers.0.attention.qkv.weight": 0.5**3,
        "layers.1.feed_forward.norm.weight": 0.5**2,
        "layers.2.feed_forward.down.weight": 0.5,
        "pooler.weight": 1.0,
        "relative_bias.weight": 1.0,
    }
    for name, rate in expected.items():
        assert group_of(model, groups, prefix + name)["lr"] == rate, name
    assert group_of(model, groups, prefix + "layers.1.attention.out.bias")["name"] == "layers.1 (no decay)"
    if prefix:
        assert group_of(model, groups, "heads.sentiment.layers.0.weight")["lr"] == 1.0


def test_heads_may_have_their_own_rate() -> None:
    model = Multitask()
    groups = parameter_groups(model, lr=1.0, weight_decay=0.0, layer_decay=0.9, head_lr=7.0)
    rates = {group["name"]: group["lr"] for group in groups}
    assert rates["heads"] == rates["heads (no decay)"] == 7.0
    assert rates["encoder top"] == 1.0
    assert rates["layers.2"] == pytest.approx(0.9)


def test_frozen_parameters_are_left_out_and_the_rest_keep_their_rates() -> None:
    model = Multitask()
    model.encoder.embeddings.requires_grad_(False)
    model.encoder.layers[2].requires_grad_(False)
    groups = parameter_groups(model, lr=1.0, weight_decay=0.01, layer_decay=0.5)
    names = {group["name"] for group in groups}
    assert names.isdisjoint({"embeddings", "embeddings (no decay)", "layers.2", "layers.2 (no decay)"})
    assert all(p.requires_grad for group in groups for p in group["params"])
    assert group_of(model, groups, "encoder.layers.1.attention.qkv.weight")["lr"] == 0.5**2


def test_no_decay_matches_whole_names_on_the_path() -> None:
    model = Encoder()
    groups = parameter_groups(model, lr=1.0, weight_decay=0.01, no_decay=("embeddings", "pool"))
    assert group_of(model, groups, "embeddings.tokens.weight")["weight_decay"] == 0.0
    assert group_of(model, groups, "pooler.weight")["weight_decay"] == 0.01


@pytest.mark.parametrize("layer_decay", [0.0, 1.5, -1.0, math.nan])
def test_layer_decay_out_of_range_is_refused(layer_decay: float) -> None:
    with pytest.raises(ValueError, match=r"layer_decay is .*; expected a number above 0 and at most 1"):
        parameter_groups(Encoder(), lr=1.0, weight_decay=0.0, layer_decay=layer_decay)


# Speed


def minilm_params() -> list[nn.Parameter]:
    norm = [(384,), (384,)]
    layer = [(1152, 384), (1152,), (384, 384), (384,), *norm, (1536, 384), (1536,), (384, 1536), (384,), *norm]
    shapes = [(30522, 384), (512, 384), (2, 384), *norm, *layer * 6, (384, 384), (384,)]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]
    for p in params:
        p.grad = 1e-3 * torch.randn(p.shape, generator=generator)
    return params


@pytest.mark.slow
def test_adamw_takes_at_most_1_15_times_torchs_time(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(2)
    request.addfinalizer(lambda: torch.set_num_threads(1))
    hyper: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.01}
    contenders = {
        "ours": AdamW(minilm_params(), **hyper),
        "torch": torch.optim.AdamW(minilm_params(), foreach=True, **hyper),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(25):
        for name, optimizer in contenders.items():
            start = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
    ratio = statistics.median(a / b for a, b in zip(seconds["ours"][3:], seconds["torch"][3:], strict=True))
    print(f"AdamW on minilm's shapes: {ratio:.3f} times torch's foreach AdamW")
    assert ratio <= 1.15
