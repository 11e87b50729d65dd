"""What `test_fused.py` has checked in Triton's interpreter, and on a GPU: see `interpreter.py`.

python -m tests.fused_checks NAME...        # with TRITON_INTERPRET=1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from minbert.model import fused as fused_module
from minbert.model import kernels
from minbert.model.encoder import ACTIVATIONS, Encoder, EncoderConfig
from minbert.model.fused import FusedEncoder, supports
from minbert.model.kernels import ColumnSums, Dropout, keep_mask
from minbert.model.packed import Packed, pack
from minbert.model.weight_gradients import Together
from minbert.training import adamw_kernels
from minbert.training.adamw_kernels import Row, Tables
from tests.interpreter import Checks
from tests.sequences import gradients, small_encoder, tokens_of

checks = Checks("tests.fused_checks")
Named = dict[str, Tensor]


def random(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def near(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Within the tolerance, measured against the largest number there is (or 1)."""
    found, expected = found.detach().float(), expected.detach().float()
    worst = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    assert worst <= tolerance, f"{what} is off by {worst:.2g}"


def all_near(found: Named, expected: Named, tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys(), f"gradients of {sorted(found.keys() ^ expected.keys())}"
    for name, value in found.items():
        near(value, expected[name], name, tolerance)


def packed_of(encoder: Encoder, lengths: Sequence[int], device: torch.device) -> Packed:
    return pack(tokens_of(lengths, kind=encoder.config.kind), encoder.config, device)


def run(hidden: Callable[[], Tensor], encoder: Encoder) -> tuple[Tensor, Named]:
    """Hidden states, and the gradients of a random sum of them."""
    found = hidden()
    if found.requires_grad:
        (found.float() * random(*found.shape, device=found.device, seed=7)).sum().backward()
    return found.detach(), gradients(encoder)


def same_as_plain(encoder: Encoder, batch: Packed, tolerance: float = 1e-5) -> Named:
    plain, expected = run(partial(encoder.packed, batch), encoder)
    fused, found = run(partial(FusedEncoder(encoder, torch.float32), batch), encoder)
    near(fused, plain, "hidden states", tolerance)
    all_near(found, expected, tolerance)
    return found


# --- the encoder ----------------------------------------------------------------------------------------------------

SHAPES = {
    # kind, lengths: blocks of 16, of 32, of 64, several blocks
    "bert-16": ("bert", [1, 3, 5, 5, 16], {"width": 48, "heads": 3}),  # a width that is no power of two
    "bert-32": ("bert", [2, 17, 32], {}),
    "bert-64": ("bert", [40, 64], {"layers": 1}),
    "bert-long": ("bert", [1, 64, 70, 130], {"layers": 1}),
    "mpnet-16": ("mpnet", [3, 5, 5, 9], {"layers": 2}),
    "mpnet-32": ("mpnet", [1, 20], {"layers": 1}),
    "mpnet-long": ("mpnet", [1, 66], {"layers": 1}),
}


@checks.add_each(SHAPES)
def parity(device: torch.device, kind: str, lengths: Sequence[int], shape: dict[str, int]) -> None:
    encoder = small_encoder(kind, **shape).to(device)
    found = same_as_plain(encoder, packed_of(encoder, lengths, device))
    if kind == "mpnet":
        assert float(found["relative_bias.weight"].abs().max()) > 0


@checks.add_each(
    {"bert": ("bert", lambda _name: True), "mpnet": ("mpnet", lambda name: not name.startswith("layers.0."))}
)
def many_tokens(device: torch.device, kind: str, learns: Callable[[str], bool]) -> None:
    """The gradients of weights come one by one, not those of all layers in one product."""
    encoder = small_encoder(kind).to(device)
    batch = packed_of(encoder, [2, 5, 5, 9], device)
    _, whole = run(partial(encoder.packed, batch), encoder)
    for key, parameter in encoder.named_parameters():
        parameter.requires_grad_(learns(key))
    with patch.object(fused_module, "FEW", 0), patch.object(Together, "finish", side_effect=AssertionError):
        _, found = run(partial(FusedEncoder(encoder, torch.float32), batch), encoder)
    all_near(found, {key: value for key, value in whole.items() if learns(key)})


@checks.add_each({name: name for name in ACTIVATIONS})
def activation_in_the_encoder(device: torch.device, name: str) -> None:
    encoder = small_encoder(layers=1, activation=name).to(device)
    same_as_plain(encoder, packed_of(encoder, [2, 3], device))


FROZEN: dict[str, Callable[[str], bool]] = {
    # which parameters learn
    "heads-only": lambda _name: False,
    "top-layer": lambda name: name.startswith("layers.1."),
    "layers": lambda name: name.startswith("layers."),
    "embeddings-only": lambda name: name.startswith("embeddings."),
    "relative-bias-only": lambda name: name.startswith("relative_bias"),
    "all-but-relative-bias": lambda name: not name.startswith("relative_bias"),
}


@checks.add_each({name: name for name in FROZEN})
def frozen(device: torch.device, name: str) -> None:
    """What does not learn has no gradient; what does has the same as if everything did."""
    encoder = small_encoder("mpnet" if "relative" in name else "bert").to(device)
    batch = packed_of(encoder, [2, 3], device)
    plain, whole = run(partial(encoder.packed, batch), encoder)
    for key, parameter in encoder.named_parameters():
        parameter.requires_grad_(FROZEN[name](key))
    hidden, found = run(partial(FusedEncoder(encoder, torch.float32), batch), encoder)
    near(hidden, plain, "hidden states")
    all_near(found, {key: value for key, value in whole.items() if FROZEN[name](key)})
    assert bool(found) == (name != "heads-only")


@checks.add
def a_frozen_encoder_gives_states_without_a_graph(device: torch.device) -> None:
    encoder = small_encoder(layers=1).to(device)
    batch = packed_of(encoder, [2, 3], device)
    fused = FusedEncoder(encoder, torch.float32)
    with torch.no_grad():
        silent = fused(batch)
    with torch.inference_mode():
        inferred = fused(batch)
    loud = fused(batch)
    assert loud.requires_grad
    encoder.requires_grad_(False)
    stopped = fused(batch)
    assert not (silent.requires_grad or inferred.requires_grad or stopped.requires_grad)
    for other in (silent, inferred, stopped):
        assert torch.equal(loud, other)


@checks.add
def equal_bits_twice(device: torch.device) -> None:
    encoder = small_encoder("mpnet", dropout=0.3, layers=1).to(device)
    batch = packed_of(encoder, [2, 5] if device.type == "cpu" else [2, 5, 9, 9, 70] * 20, device)
    fused = FusedEncoder(encoder, torch.float32)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        hidden, found = run(partial(fused, batch), encoder)
        runs.append({"hidden": hidden, **found})
    one, same, other = runs
    assert [name for name in one if not torch.equal(one[name], same[name])] == []
    assert not torch.equal(one["hidden"], other["hidden"])


@checks.add
def eval_drops_nothing(device: torch.device) -> None:
    dropping, still = small_encoder(dropout=0.5).to(device), small_encoder().to(device)
    batch = packed_of(still, [2, 5], device)
    with torch.no_grad():
        expected = FusedEncoder(still, torch.float32)(batch)
        assert torch.equal(FusedEncoder(dropping.eval(), torch.float32)(batch), expected)
        assert not torch.equal(FusedEncoder(dropping.train(), torch.float32)(batch), expected)


@checks.add_each({"bf16": (torch.bfloat16, 0.08, 2e-2)}, interpreted=False)  # it multiplies bf16 as if it were integers
@checks.add_each({"fp16": (torch.float16, 1e-2, 3e-3)})
def low_precision(device: torch.device, dtype: torch.dtype, states: float, slopes: float) -> None:
    """Hidden states come out of a norm, so their size is about 1; gradients relative to their size."""
    for kind, lengths in (("bert", [2, 5, 16]), ("mpnet", [3, 66])):
        encoder = small_encoder(kind, layers=1 if device.type == "cpu" else 2).to(device)
        for layer in encoder.modules():
            if isinstance(layer, torch.nn.LayerNorm):
                torch.nn.init.ones_(layer.weight)
                torch.nn.init.zeros_(layer.bias)
        batch = packed_of(encoder, lengths, device)
        plain, expected = run(partial(encoder.packed, batch), encoder)
        fused, found = run(partial(FusedEncoder(encoder, dtype), batch), encoder)
        assert fused.dtype == dtype
        worst = float((fused.float() - plain).abs().max())
        assert worst <= states, f"hidden states of {kind} are off by {worst:.2g}"
        assert found.keys() == expected.keys()
        assert {value.dtype for value in found.values()} == {torch.float32}
        whole = torch.cat([value.flatten() for value in expected.values()])
        gap = torch.cat([value.flatten() for value in found.values()]) - whole
        assert float(gap.norm() / whole.norm()) <= slopes, (
            f"gradients of {kind}: {float(gap.norm() / whole.norm()):.2g}"
        )


@checks.add
def copies_follow_when_they_are_told(device: torch.device) -> None:
    encoder = small_encoder(layers=1).to(device)
    fused = FusedEncoder(encoder, torch.float16)
    copies = fused.copies()
    assert {tuple(value.shape) for value in copies} == {
        tuple(value.shape) for name, value in encoder.layers.named_parameters() if "norm" not in name
    }
    with torch.no_grad():
        for value in encoder.parameters():
            value.mul_(2)
    assert not any(torch.equal(value.half(), low) for value, low in copies.items())
    fused.refresh()
    assert all(torch.equal(value.half(), low) for value, low in copies.items())
    assert FusedEncoder(encoder, torch.float32).copies() == {}


@checks.add
def shapes_that_the_kernels_know(device: torch.device) -> None:
    known = [supports(EncoderConfig(width=width, heads=heads)) for width, heads in [(768, 12), (384, 12), (48, 3)]]
    unknown = [supports(EncoderConfig(width=width, heads=heads)) for width, heads in [(32, 4), (96, 2), (96, 4)]]
    unknown.append(supports(EncoderConfig(positions=12)))
    assert known == [True] * 3
    assert unknown == [False] * 4


# --- dropout --------------------------------------------------------------------------------------------------------


@triton.jit
def _write_mask(out, seeds, site, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    keep = keep_mask(tl.load(seeds + site), rows, columns, threshold)
    tl.store(out + rows[:, None] * COLUMNS + columns[None, :], keep.to(tl.int8))


def kernel_mask(seeds: Tensor, site: int, rate: float, rows: int, columns: int) -> Tensor:
    out = torch.empty((rows, columns), dtype=torch.int8, device=seeds.device)
    _write_mask[(1,)](out, seeds, site, Dropout(rate, seeds, site).threshold, ROWS=rows, COLUMNS=columns)
    return out.bool().cpu()


def hash_mask(seed: int, rows: NDArray[np.integer], columns: NDArray[np.integer], rate: float) -> Tensor:
    """`keep_mask` written out in numpy."""

    def mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        return x ^ (x >> np.uint32(16))

    row = mix(rows.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(seed % 2**32))
    column = columns.astype(np.uint32) * np.uint32(0x85EBCA77)
    return torch.from_numpy(mix(row[:, None] ^ column[None, :]) >= np.uint32(round(rate * 2**32)))


def seeds_on(device: torch.device, count: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=generator).to(device)


@checks.add
def masks_are_the_hash(device: torch.device) -> None:
    seeds = seeds_on(device)
    for site, rate in enumerate((0.1, 0.25, 0.5, 0.9)):
        expected = hash_mask(int(seeds[site]), np.arange(64), np.arange(32), rate)
        assert torch.equal(kernel_mask(seeds, site, rate, 64, 32), expected), rate


@checks.add
def masks_keep_what_they_should(device: torch.device) -> None:
    """Within five deviations of the rate, in all and in each row and column."""
    seeds = seeds_on(device)
    for site, rate in enumerate((0.05, 0.1, 0.5)):
        kept = kernel_mask(seeds, site, rate, 512, 256).double()
        for axis, count in ((None, 512 * 256), (0, 512), (1, 256)):
            means = kept.mean() if axis is None else kept.mean(axis)
            bound = 5 * math.sqrt(rate * (1 - rate) / count)
            assert float((means - (1 - rate)).abs().max()) <= bound, (rate, axis)


@checks.add
def masks_of_different_places_are_independent(device: torch.device) -> None:
    """Two masks at a rate of a half agree in half of their elements: sites, rows, columns, and heads further down."""
    seeds = seeds_on(device)
    masks = [kernel_mask(seeds, site, 0.5, 256, 256) for site in range(3)]
    first = masks[0]
    pairs = {
        "sites": (first, masks[1]),
        "further sites": (masks[1], masks[2]),
        "rows": (first[1:], first[:-1]),
        "columns": (first[:, 1:], first[:, :-1]),
        "heads": (first[:128], first[128:]),
        "rows and columns": (first, first.t()),
    }
    for name, (one, other) in pairs.items():
        agree = float((one == other).double().mean())
        assert abs(agree - 0.5) <= 5 * 0.5 / math.sqrt(one.numel()), f"{name}: {agree:.3f}"


def attention_by_hand(
    qkv: Tensor, encoder: Encoder, batch: Packed, seed: int, rate: float, bias: Callable[[int], Tensor | None]
) -> Tensor:
    """Sequence by sequence and head by head, each with the mask of its rows."""
    config, tokens = encoder.config, len(qkv)
    size = config.width // config.heads
    found = []
    offsets = batch.offsets.tolist()
    for start, end in pairwise(offsets):
        heads = []
        for head in range(config.heads):
            columns = [
                slice(part * config.width + head * size, part * config.width + (head + 1) * size) for part in range(3)
            ]
            query, key, value = (qkv[start:end, where] for where in columns)
            scores = query @ key.t() / math.sqrt(size)
            near_bias = bias(end - start)
            weights = torch.softmax(scores if near_bias is None else scores + near_bias[head], dim=-1)
            rows = head * tokens + np.arange(start, end)
            keep = hash_mask(seed, rows, np.arange(end - start), rate).to(qkv.device)
            heads.append((weights * keep / (1 - rate)) @ value)
        found.append(torch.cat(heads, dim=1))
    return torch.cat(found)


def encoder_by_hand(encoder: Encoder, batch: Packed, seeds: Tensor, rate: float) -> Tensor:
    """The encoder in training with the masks of the kernels."""
    config, numbers = encoder.config, seeds.tolist()

    def drop(x: Tensor, site: int) -> Tensor:
        keep = hash_mask(numbers[site], np.arange(x.shape[0]), np.arange(x.shape[1]), rate).to(x.device)
        return x * keep / (1 - rate)

    def bias(length: int) -> Tensor | None:
        found = encoder._attention_bias(length, None)
        return None if found is None else found[0]

    first = encoder.embeddings
    summed = first.tokens(batch.ids) + first.positions(batch.positions)
    if first.segments is not None:
        summed = summed + first.segments(batch.segments)
    x = drop(first.norm(summed), 0)
    for number, layer in enumerate(encoder.layers):
        site = 1 + 3 * number
        attention, feed_forward = layer.attention, layer.feed_forward
        mixed = attention_by_hand(attention.qkv(x), encoder, batch, numbers[site], rate, bias)
        x = attention.norm(x + drop(attention.out(mixed), site + 1))
        inner = ACTIVATIONS[config.activation](feed_forward.up(x))
        x = feed_forward.norm(x + drop(feed_forward.down(inner), site + 2))
    return x


@checks.add_each({"bert": ("bert", [1, 3, 16]), "bert-long": ("bert", [5, 70]), "mpnet": ("mpnet", [2, 5])})
def dropout_is_its_masks(device: torch.device, kind: str, lengths: Sequence[int]) -> None:
    """States and gradients are those of the masks written out, so the way back draws the same ones again."""
    rate = 0.25
    encoder = small_encoder(kind, dropout=rate, layers=1 if "long" in kind or max(lengths) > 64 else 2).to(device)
    batch = packed_of(encoder, lengths, device)
    fused, seeds = FusedEncoder(encoder, torch.float32), seeds_on(device, 7)
    fused._seeds = lambda: seeds  # type: ignore[method-assign]
    expected, slopes = run(lambda: encoder_by_hand(encoder, batch, seeds, rate), encoder)
    hidden, found = run(partial(fused, batch), encoder)
    near(hidden, expected, "hidden states")
    all_near(found, slopes)


@checks.add
def seeds_come_from_torchs_generator(device: torch.device) -> None:
    encoder = small_encoder(dropout=0.1).to(device)
    fused = FusedEncoder(encoder, torch.float32)
    torch.manual_seed(4)
    one, other = fused._seeds(), fused._seeds()
    torch.manual_seed(4)
    assert torch.equal(one, fused._seeds())
    assert not torch.equal(one, other)
    assert len(set(one.tolist())) == len(one) == 1 + 3 * 2, "a number for each place"
    encoder.eval()
    torch.manual_seed(4)
    assert fused._seeds().tolist() == [0] * 7
    encoder.train()
    assert torch.equal(one, fused._seeds()), "reading draws nothing"


# --- kernels by themselves ------------------------------------------------------------------------------------------


def still(device: torch.device) -> Dropout:
    """None at all."""
    return Dropout(0.0, torch.zeros(1, dtype=torch.int32, device=device), 0)


@checks.add_each({"48": (205, 48), "1": (1, 32), "160": (30, 160)})
def norm(device: torch.device, rows: int, width: int) -> None:
    """More rows than the programs hold at once, and a width that is no power of two."""
    x, residual, weights = (random(rows, width, device=device, seed=seed).requires_grad_() for seed in range(3))
    gamma, beta = (random(width, device=device, seed=seed).requires_grad_() for seed in (3, 4))
    expected = F.layer_norm(x + residual, (width,), gamma, beta, 1e-12)
    slopes = torch.autograd.grad((expected * weights).sum(), [x, gamma, beta])
    summed, moments, grad_x = torch.empty_like(x), torch.empty((rows, 2), device=device), torch.empty_like(x)
    given = (x.detach(), residual.detach(), gamma.detach(), beta.detach(), 1e-12, still(device))
    out = kernels.norm(*given, torch.empty_like(x), summed, moments)
    near(out, expected, "norm")
    near(summed, x + residual, "sum")
    sums = ColumnSums.of(3 * width + 2 * width, rows, device)
    back = (weights.detach(), summed, moments, gamma.detach(), still(device), sums)
    grad_sum = kernels.norm_backward(*back, grad_x)
    after = kernels.norm_backward(*back, None)
    assert grad_sum.data_ptr() != grad_x.data_ptr(), "others will be added to the sum's"
    for found in (grad_sum, grad_x, after):
        near(found, slopes[0], "gradient of x")
    total = sums.add()
    assert not len(sums.add()), "those were added before"
    for place, wanted in enumerate((slopes[1], slopes[2], slopes[0].sum(0), slopes[1], slopes[2])):
        near(total[place * width : (place + 1) * width], wanted, f"sum {place}")


@checks.add_each({name: name for name in ACTIVATIONS})
def activation(device: torch.device, name: str) -> None:
    x = torch.cat([random(2000, device=device) * 3, torch.tensor([-40.0, 40.0, -1e-3, 1e-3], device=device)])
    x = x.reshape(4, -1).requires_grad_()
    weights = random(*x.shape, device=device, seed=1)
    expected = ACTIVATIONS[name](x)
    near(kernels.activation(x.detach(), name, torch.empty_like(x)), expected, name)
    wanted = torch.autograd.grad((expected * weights).sum(), x)[0]
    near(kernels.activation_backward(weights, x.detach(), name, torch.empty_like(x)), wanted, f"slope of {name}")


@checks.add_each({"48": 48, "160": 160})
def scatter(device: torch.device, width: int) -> None:
    """Keys that come once, sixteen times, more often, and never."""
    keys = torch.tensor([3] * 16 + [0] + [7] * 35 + [5, 2, 5], dtype=torch.int32, device=device)
    keys = keys[torch.randperm(len(keys), generator=torch.Generator().manual_seed(0)).to(device)]
    rows = random(len(keys), width, device=device)
    expected = torch.zeros((9, width), device=device).index_add(0, keys, rows)

    def scattered() -> Tensor:
        return kernels.scatter_rows(rows, *torch.sort(keys, stable=True), torch.zeros_like(expected))

    found = scattered()
    near(found, expected, "table")
    assert torch.equal(found, scattered())
    assert not found[[1, 4, 6, 8]].any()


# --- AdamW ----------------------------------------------------------------------------------------------------------

BETAS = (0.9, 0.999)
SIZES = [(2100,), (3, 7), (), (20, 6)]  # the first is more than one program's
GROUPS = [0, 0, 1, 1]
RATES, DECAYS = [1e-3, 5e-3], [0.1, 0.0]


class Fleet:
    """The same parameters for our kernel and for torch.optim."""

    def __init__(
        self, device: torch.device, betas: tuple[float, float] = BETAS, low: torch.dtype | None = None
    ) -> None:
        self.betas, self.device = betas, device
        self.ours = [random(*size, device=device, seed=number) for number, size in enumerate(SIZES)]
        self.theirs = [torch.nn.Parameter(value.clone()) for value in self.ours]
        groups = [
            {
                "params": [p for p, group in zip(self.theirs, GROUPS, strict=True) if group == number],
                "lr": rate,
                "weight_decay": decay,
            }
            for number, (rate, decay) in enumerate(zip(RATES, DECAYS, strict=True))
        ]
        self.authority = torch.optim.AdamW(groups, betas=betas, foreach=True)
        self.first = [torch.zeros_like(value) for value in self.ours]
        self.second = [torch.zeros_like(value) for value in self.ours]
        self.steps = [torch.zeros((), device=device) for _ in self.ours]
        self.low = [None if low is None or number == 1 else value.to(low) for number, value in enumerate(self.ours)]
        self.grads = [torch.zeros_like(value) for value in self.ours]
        self.tables = Tables()
        self.rates, self.decays = torch.tensor(RATES, device=device), torch.tensor(DECAYS, device=device)

    def draw(self, seed: int) -> None:
        for number, grad in enumerate(self.grads):
            grad.copy_(random(*SIZES[number], device=self.device, seed=100 * seed + number))

    def move(self, clip: float = 0.0, loss_scale: Tensor | None = None, who: Sequence[int] = range(4)) -> Tensor:
        rows = [
            Row(GROUPS[n], self.ours[n], self.grads[n], self.first[n], self.second[n], self.steps[n], self.low[n])
            for n in who
        ]
        return adamw_kernels.update(rows, self.tables, self.rates, self.decays, self.betas, 1e-8, clip, loss_scale)

    def follow(self, clip: float = 0.0, who: Sequence[int] = range(4), scale: float = 1.0) -> float:
        """torch's own step; returns the norm of the gradients."""
        for number, p in enumerate(self.theirs):
            p.grad = self.grads[number] / scale if number in who else None
        whole = float(torch.nn.utils.clip_grad_norm_(self.theirs, clip or math.inf))
        self.authority.step()
        return whole

    def compare(self, tolerance: float = 1e-6) -> None:
        for number, (mine, reference) in enumerate(zip(self.ours, self.theirs, strict=True)):
            near(mine, reference.detach(), f"parameter {number}", tolerance)
            state = self.authority.state[reference]
            near(self.first[number], state["exp_avg"], f"first moment {number}", tolerance)
            near(self.second[number], state["exp_avg_sq"], f"second moment {number}", tolerance)
            assert float(self.steps[number]) == float(state["step"])
            low = self.low[number]
            if low is not None and (low.dtype, self.device.type) == (torch.bfloat16, "cpu"):
                near(low, mine, f"copy {number}", 2**-7)  # the interpreter cuts where a GPU rounds
            elif low is not None:
                assert torch.equal(low, mine.to(low.dtype)), f"copy {number}"


@checks.add_each({"bf16": torch.bfloat16, "fp16": torch.float16})
def adamw_is_torchs(device: torch.device, low: torch.dtype) -> None:
    """Two hundred steps, groups, weight decay, clipping that bites, and copies. Some parameters learn seldom."""
    fleet = Fleet(device, low=low)
    for step in range(200 if low == torch.bfloat16 else 10):
        fleet.draw(step)
        who = range(4) if step % 10 == 0 else [1, 3]
        found = fleet.move(clip=1.0, who=who)
        whole = fleet.follow(clip=1.0, who=who)
        assert whole > 1
        assert abs(float(found[0]) / whole - 1) <= 1e-4
        assert float(found[1]) == 0
    fleet.compare()


@checks.add
def adamw_clips_only_what_is_too_long(device: torch.device) -> None:
    fleet = Fleet(device)
    for step, clip in enumerate([0.0, 1e6, 1e-3]):
        fleet.draw(step)
        divisor = float(fleet.move(clip=clip)[0])
        fleet.follow(clip=clip)
        assert (divisor == 1) == (clip != 1e-3)
    fleet.compare()


@checks.add
def adamw_without_momentum(device: torch.device) -> None:
    fleet = Fleet(device, betas=(0.0, 0.0))
    for step in range(3):
        fleet.draw(step)
        fleet.move()
        fleet.follow()
    fleet.compare()


@checks.add
def adamw_counts_each_parameters_steps(device: torch.device) -> None:
    fleet = Fleet(device)
    for step in range(12):
        fleet.draw(step)
        who = [number for number in range(4) if step % (number + 1) == 0]
        fleet.move(clip=0.5, who=who)
        fleet.follow(clip=0.5, who=who)
    assert [float(count) for count in fleet.steps] == [12, 6, 4, 3]
    fleet.compare()


@checks.add
def adamw_of_tensors_that_are_not_aligned(device: torch.device) -> None:
    fleet = Fleet(device)
    for tensors in (fleet.ours, fleet.grads, fleet.first, fleet.second):
        for number, value in enumerate(tensors):
            room = torch.empty(value.numel() + 1, device=device)[1:].view(value.shape)
            tensors[number] = room.copy_(value)
    assert any(value.data_ptr() % 16 for value in fleet.ours)
    for step in range(3):
        fleet.draw(step)
        fleet.move(clip=1.0)
        fleet.follow(clip=1.0)
    fleet.compare()


@checks.add
def adamw_does_nothing_when_a_scaled_gradient_overflows(device: torch.device) -> None:
    """Scaled by 1024; of twelve steps four overflow, the first one among them, in which nothing moves or is counted."""
    fleet, scale = Fleet(device, low=torch.bfloat16), torch.tensor(1024.0, device=device)
    for step in range(12):
        fleet.draw(step)
        for grad in fleet.grads:
            grad.mul_(1024)
        if step % 3 == 0:
            fleet.grads[step // 3 % 4].flatten()[0] = [math.inf, math.nan, -math.inf, math.nan][step // 3]
            before = [value.clone() for value in (*fleet.ours, *fleet.first, *fleet.second, *fleet.steps)]
            assert float(fleet.move(clip=1.0, loss_scale=scale)[1]) == 1
            after = [*fleet.ours, *fleet.first, *fleet.second, *fleet.steps]
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
            continue
        clip = 1.0 if step % 2 else 0.0
        assert float(fleet.move(clip=clip, loss_scale=scale)[1]) == 0
        fleet.follow(clip=clip, scale=1024.0)
    assert {float(count) for count in fleet.steps} == {8.0}
    fleet.compare()


@checks.add
def adamw_finds_its_tables_again(device: torch.device) -> None:
    """One table for each set of gradients; not more than a few dozens when they are elsewhere in every step."""
    fleet = Fleet(device)
    fleet.draw(0)
    for _ in range(3):
        fleet.move()
    assert len(fleet.tables.tables) == 1
    assert len(fleet.tables.chunks) == 1
    fleet.move(who=[0, 2])
    assert (len(fleet.tables.tables), len(fleet.tables.chunks)) == (2, 2)
    kept = []
    for _ in range(80):
        kept.append(fleet.grads)
        fleet.grads = [grad.clone() for grad in fleet.grads]
        rows = [
            Row(GROUPS[n], fleet.ours[n], fleet.grads[n], fleet.first[n], fleet.second[n], fleet.steps[n], None)
            for n in range(4)
        ]
        fleet.tables.table(rows)
        assert len(fleet.tables.tables) <= 65


if __name__ == "__main__":
    checks.main()
