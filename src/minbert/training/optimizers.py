"""AdamW and RAdam by hand, and how a model's parameters are sorted into groups for them.

The two differ only in the size of the step, so everything else is written once. Each variant comes down to
``p -= step_size * m / (sqrt(v) + eps)`` with two plain numbers per parameter group and step count: the bias
corrections are folded into those numbers instead of costing a pass over the tensors.

The most common variant, AdamW with torch's bias correction, is computed by one compiled kernel that reads and writes
everything once: torch's own on a CPU, ours on a GPU (`adamw_kernels.py`). Step counts are tensors then, and the
learning rates may be, so that a CUDA graph can hold the step.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from types import ModuleType

    from torch.optim.optimizer import ParamsT

BiasCorrection = Literal["torch", "course", "none"]
Row = tuple[Tensor, ...]  # (parameter, gradient, exp_avg, exp_avg_sq), all of one shape

# On a CPU torch.optim's foreach AdamW streams every tensor through main memory once per operation. Elements worked on
# together here: five floats for each stay in a server's cache from the first operation to the last, which halves the
# time. Half as many is as fast on a quiet machine, but on a busy one every call waits for the slowest thread.
BLOCK = 1 << 20


class _Adam(Optimizer, ABC):
    """The moments, their state and the weight decay (0 unless asked for); a subclass says how large the step is."""

    bias_corrections: ClassVar[tuple[BiasCorrection, ...]]
    clip: float = 0.0
    """The largest norm of all gradients together; longer ones are shortened to it. 0: as they come."""
    loss_scale: Tensor | None = None
    """What the losses were multiplied with, and the gradients are to be divided by."""
    found_inf: Tensor | None = None
    """Not 0 after a step with a loss scale: the gradients had overflowed, and nothing moved."""
    rates: Tensor | None = None
    """The groups' learning rates on the device, (groups,), instead of their ``lr``. Only a GPU's fused step knows it."""
    copies: Mapping[Tensor, Tensor]
    """Low-precision copies of parameters. Only a GPU's fused step keeps them up to date."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: BiasCorrection = "torch",
        fused: bool = True,
    ) -> None:
        self.fused, self.copies = fused, {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})

    @abstractmethod
    def step_size(self, group: dict[str, Any], step: int) -> tuple[float, float | None]:
        """``(step_size, eps)`` of the update at count ``step``; an ``eps`` of None means ``p -= step_size * m``."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Where ``load_state_dict`` ends; checkpoints of torch's own classes, with steps as tensors, go on here."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("bias_correction", "torch")
            self._check(group)
        self.__dict__.setdefault("fused", True)
        self.__dict__.setdefault("copies", {})
        for stale in ("_kernel_tables", "_decays"):  # made of the state that was there before
            self.__dict__.pop(stale, None)
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    self.state[p]["step"] = self._count(group, p, float(self.state[p]["step"]))

    @property
    def capturable(self) -> bool:
        """Can a CUDA graph hold a step: nothing is read back, and nothing that changes comes from the host?"""
        fused = all(self._fuses(group, p) for group in self.param_groups for p in group["params"])
        return fused and self.param_groups[0]["params"][0].device.type == "cuda" and self._kernels() is not None

    def reserve(self) -> None:
        """To be called before a step is recorded into a CUDA graph; what `settle` returns after it belongs to that."""
        device = self.param_groups[0]["params"][0].device
        self._tables().reserve(sum(len(group["params"]) for group in self.param_groups), device)

    def settle(self) -> list[Tensor]:
        return self._tables().settle()

    def _fuses(self, group: dict[str, Any], p: Tensor) -> bool:  # noqa: ARG002 - AdamW's depends on it
        return False

    def _count(self, group: dict[str, Any], p: Tensor, step: float) -> int | Tensor:
        """A step count as the parameter's kind of step wants it."""
        return torch.tensor(step, dtype=torch.float32, device=p.device) if self._fuses(group, p) else int(step)

    def _check(self, group: dict[str, Any]) -> None:
        for key in ("lr", "eps", "weight_decay"):
            if not (isinstance(group[key], Real) and 0 <= group[key] < math.inf):
                raise ValueError(f"{key} is {group[key]!r}; expected a finite number of at least 0")
        betas = group["betas"]
        if not (isinstance(betas, tuple | list) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"betas is {betas!r}; expected two numbers from 0 to below 1")
        if group["bias_correction"] not in self.bias_corrections:
            expected = " or ".join(f'"{name}"' for name in self.bias_corrections)
            raise ValueError(
                f"bias_correction of {type(self).__name__} is {group['bias_correction']!r}; expected {expected}"
            )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; those without keep their values, moments and step count."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Counts are Python ints, or tensors that the kernel reads: nothing here waits for a GPU. Tensors of one key
        # share their two numbers, or a launch.
        work: defaultdict[tuple[int, int | None, torch.device, torch.dtype], list[Row]] = defaultdict(list)
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.layout is not torch.strided or p.is_complex():
                    found = f"{p.grad.layout} of {p.grad.dtype} for a parameter of shape {tuple(p.shape)}"
                    raise ValueError(f"gradient is {found}; {type(self).__name__} expects dense real gradients")
                state = self.state[p]
                if not state:
                    count = self._count(group, p, 0)
                    state.update(step=count, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                step = None if isinstance(state["step"], Tensor) else state["step"] + 1
                grad = p.grad if step is not None else p.grad.contiguous()  # the kernel walks all four alike
                work[index, step, p.device, p.dtype].append((p, grad, state["exp_avg"], state["exp_avg_sq"]))
        on_gpu = [(key[0], rows) for key, rows in work.items() if key[1] is None and key[2].type == "cuda"]
        if on_gpu and len(on_gpu) == len(work) and self._kernels() is not None:
            self._update_on_gpu(on_gpu)
            return loss
        divisor = self._divisor([row[1] for rows in work.values() for row in rows])
        for (index, step, _, _), rows in work.items():
            if step is None:
                self._update_fused(self.param_groups[index], rows, divisor)
                continue
            if divisor is not None:
                torch._foreach_div_([row[1] for row in rows], divisor)
            self._update(self.param_groups[index], step, rows)
            for p, *_ in rows:
                self.state[p]["step"] = step
        return loss

    def _divisor(self, grads: list[Tensor]) -> Tensor | None:
        """What gradients are to be divided by: the loss scale, the excess of their norm over the limit, or both."""
        if not grads or not (self.clip or self.loss_scale is not None):
            return None
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        if self.loss_scale is None:
            return ((norm + 1e-6) / self.clip).clamp(min=1.0)
        self.found_inf = (~norm.isfinite()).float()
        excess = ((norm / self.loss_scale + 1e-6) / self.clip).clamp(min=1.0) if self.clip else torch.ones_like(norm)
        return self.loss_scale * excess.nan_to_num(1.0, 1.0)

    def _update_fused(self, group: dict[str, Any], rows: list[Row], divisor: Tensor | None) -> None:
        params, grads, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*rows, strict=True))
        steps = [self.state[p]["step"] for p in params]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            params, grads, exp_avgs, exp_avg_sqs, [], steps, lr=group["lr"], beta1=group["betas"][0],
            beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False,
            maximize=False, grad_scale=None if divisor is None else divisor.float(), found_inf=self.found_inf,
        )  # fmt: skip
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))

    def _update_on_gpu(self, work: list[tuple[int, list[Row]]]) -> None:
        """All groups in one launch."""
        kernels = self._kernels()
        assert kernels is not None
        rows = [
            kernels.Row(index, p, grad, first, second, self.state[p]["step"], self.copies.get(p))
            for index, found in work
            for p, grad, first, second in found
        ]
        device, group = rows[0].parameter.device, self.param_groups[0]
        if not hasattr(self, "_decays"):
            self._decays = torch.tensor([float(each["weight_decay"]) for each in self.param_groups], device=device)
        rates = self.rates
        if rates is None:
            rates = torch.tensor([float(each["lr"]) for each in self.param_groups], device=device)
        settings = tuple(group["betas"]), group["eps"], self.clip, self.loss_scale
        found = kernels.update(rows, self._tables(), rates, self._decays, *settings)
        if self.loss_scale is not None:
            self.found_inf = found[1]

    def _kernels(self) -> ModuleType | None:
        """Ours, where there is a Triton and the groups share what the kernel takes once."""
        shared = {(*group["betas"], group["eps"]) for group in self.param_groups}
        single = all(p.dtype == torch.float32 for group in self.param_groups for p in group["params"])
        if len(shared) > 1 or not single or importlib.util.find_spec("triton") is None:
            return None
        return importlib.import_module("minbert.training.adamw_kernels")

    def _tables(self) -> Any:
        if not hasattr(self, "_kernel_tables"):
            kernels = self._kernels()
            assert kernels is not None
            self._kernel_tables = kernels.Tables()
        return self._kernel_tables

    def _update(self, group: dict[str, Any], step: int, rows: list[Row]) -> None:
        beta1, beta2 = group["betas"]
        step_size, eps = self.step_size(group, step)
        kept = 1 - group["lr"] * group["weight_decay"]
        kept_before, kept_after = (1, kept) if group["bias_correction"] == "course" else (kept, 1)
        for block in _cache_blocks(rows):
            params, grads, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*block, strict=True))
            if kept_before != 1:
                torch._foreach_mul_(params, kept_before)
            torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
            torch._foreach_mul_(exp_avg_sqs, beta2)
            torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
            if eps is None:
                torch._foreach_add_(params, exp_avgs, alpha=-step_size)
            else:
                denominators = torch._foreach_sqrt(exp_avg_sqs)
                torch._foreach_add_(denominators, eps)
                torch._foreach_addcdiv_(params, exp_avgs, denominators, -step_size)
            if kept_after != 1:
                torch._foreach_mul_(params, kept_after)


class AdamW(_Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101).

    With ``m`` and ``v`` the running means of the gradient and of its square, ``bias_correction`` chooses:

    - ``"torch"``: both means corrected, epsilon added to the corrected root, decay before the step; torch.optim.AdamW.
    - ``"course"``: the "efficient" form of Stanford's CS224N, ``lr * sqrt(1 - beta2^t) / (1 - beta1^t)`` with epsilon
      added to the uncorrected root, and the decay, ``p -= lr * weight_decay * p``, after the step.
    - ``"none"``: the means as they are, decay before the step; the optimizer BERT was published with.
    """

    bias_corrections = ("torch", "course", "none")

    def _fuses(self, group: dict[str, Any], p: Tensor) -> bool:
        plain = p.is_contiguous() and p.dtype in (torch.float32, torch.float64)
        return self.fused and group["bias_correction"] == "torch" and plain

    def step_size(self, group: dict[str, Any], step: int) -> tuple[float, float | None]:
        if group["bias_correction"] == "none":
            return group["lr"], group["eps"]
        first, root = _corrections(group, step)
        # lr * (m / first) / (sqrt(v) / root + eps), with numerator and denominator multiplied by root
        eps = group["eps"] * root if group["bias_correction"] == "torch" else group["eps"]
        return group["lr"] * root / first, eps


class RAdam(_Adam):
    """Rectified Adam (Liu et al. 2020, arXiv:1908.03265), with decoupled weight decay.

    While too few gradients were seen for the variance of Adam's step to be finite, the step is momentum alone,
    ``lr * m_hat``. After that Adam's step is multiplied by ``r_t``, which grows towards 1::

        rho_inf = 2 / (1 - beta2) - 1
        rho_t = rho_inf - 2 t beta2^t / (1 - beta2^t)
        r_t = sqrt((rho_t - 4) (rho_t - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho_t))

    The paper switches at ``rho_t > 4``; its authors' code and torch wait until 5 because ``rho_t`` is an
    approximation, and so do we. Both also add epsilon to the uncorrected root, unlike in AdamW.

    ``bias_correction``: ``"torch"`` is torch.optim.RAdam with ``decoupled_weight_decay=True``; ``"course"`` differs
    only in that the decay comes after the step. ``"none"`` is refused: ``r_t`` is derived for the corrected moments.

    The formula that Vinjapuri & Vasireddy (a CS224N project) print under this name is not RAdam. Its ``r_t = rho_t -
    2 beta2^t + 1`` is no root of a ratio of variances and does not tend to 1; ``min(r_t / sqrt(v_{t-1}), 0.001)`` caps
    the step so low that the cap nearly always holds, and uses the second moment from before this gradient (zero at
    first); one root spans all of ``(1 - beta2^t) / (1 - beta1^t)``; the step follows the raw gradient, not its running
    mean; and there is no fallback to momentum. What is left is close to SGD at a thousandth of the learning rate.
    """

    bias_corrections = ("torch", "course")

    def step_size(self, group: dict[str, Any], step: int) -> tuple[float, float | None]:
        first, root = _corrections(group, step)
        beta2 = group["betas"][1]
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 * step * beta2**step / (1 - beta2**step)
        if rho <= 5:
            return group["lr"] / first, None
        rectification = math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
        return group["lr"] * rectification * root / first, group["eps"]


def parameter_groups(
    model: torch.nn.Module,
    *,
    lr: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    head_lr: float | None = None,
    no_decay: Collection[str] = ("relative_bias",),
) -> list[dict[str, Any]]:
    """Sort a model's trainable parameters into named groups by learning rate and weight decay.

    Biases and LayerNorms (everything below two dimensions), and whatever has a name in ``no_decay`` on its dotted
    path, are not decayed. Each encoder layer learns at ``layer_decay`` times the rate of the one above it and the
    embeddings come last; pooler and heads learn at ``lr``, or the heads at ``head_lr``.
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay is {layer_decay!r}; expected a number above 0 and at most 1")
    # Frozen layers are counted too: freezing one must not change how fast the others learn.
    depths = [_place(name)[1] for name, _ in model.named_parameters()]
    top = 1 + max((depth for depth in depths if depth is not None), default=0)
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        place, depth = _place(name)
        rate = lr * layer_decay ** (0 if depth is None else top - depth)
        if place == "heads":
            rate = lr if head_lr is None else head_lr
        elif layer_decay == 1:
            place = "encoder"  # one rate, one group: fewer, larger multi-tensor calls
        decayed = parameter.ndim >= 2 and set(no_decay).isdisjoint(name.split("."))
        label = place if decayed else f"{place} (no decay)"
        settings = {"name": label, "params": [], "lr": rate, "weight_decay": weight_decay if decayed else 0.0}
        groups.setdefault(label, settings)["params"].append(parameter)
    return list(groups.values())


def _place(name: str) -> tuple[str, int | None]:
    """Where a parameter sits, and its depth counted from the embeddings; None is the top, above every layer."""
    path = name.split(".")
    prefixed = "encoder" in path
    match path[path.index("encoder") + 1 :] if prefixed else path:
        case ["embeddings", *_]:
            return "embeddings", 0
        case ["layers", index, *_] if index.isdecimal():
            return f"layers.{index}", int(index) + 1
        case ["pooler" | "relative_bias", *_]:
            return "encoder top", None
        case _:
            return ("encoder top" if prefixed else "heads"), None


def _corrections(group: dict[str, Any], step: int) -> tuple[float, float]:
    """What ``m`` and ``sqrt(v)`` are divided by to undo their start at zero."""
    beta1, beta2 = group["betas"]
    return 1 - beta1**step, math.sqrt(1 - beta2**step)


def _cache_blocks(rows: list[Row]) -> Iterator[list[Row]]:
    """On a GPU everything at once; on a CPU at most ``BLOCK`` elements: small tensors together, large ones sliced."""
    if rows[0][0].device.type != "cpu":
        yield rows
        return
    block: list[Row] = []
    filled = 0
    for piece in chain.from_iterable(map(_slices, rows)):
        size = piece[0].numel()
        if block and filled + size > BLOCK:
            yield block
            block, filled = [], 0
        block.append(piece)
        filled += size
    yield block


def _slices(row: Row) -> Iterable[Row]:
    size = row[0].numel()
    if size <= BLOCK:
        return [row]
    height = max(1, row[0].shape[0] * BLOCK // size)
    return zip(*(torch.split(tensor, height) for tensor in row), strict=True)
