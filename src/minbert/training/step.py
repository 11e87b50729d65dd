"""What happens in one step: forward, losses, gradient, and an update of the weights.

    step = TrainStep(recipe, model, rule=add_gradients, precision="bf16")
    step.gradient(batch)          # adds to the parameters' .grad and to the running losses
    step.gradient_apart(batches)  # the same for a rule that looks at one task after the other
    step.gradient_cached(batches) # the same for one contrastive batch in chunks
    step.update()                 # clips, moves the weights, clears the gradients

Unless the rule does, nothing here waits for the device or reads anything back from it, so that a CUDA graph can hold all
of it (`graphs.py`). What changes from step to step, the learning rates, comes in through tensors there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from minbert.config import OptimizerConfig, Recipe
from minbert.data.inputs import Batch
from minbert.errors import MinbertError
from minbert.model.multitask import MultitaskModel, Ready, ready
from minbert.model.runner import FusedRunner
from minbert.training.grad_cache import cached_gradient
from minbert.training.gradients import GradientRule
from minbert.training.losses import WEIGHTINGS, build_loss, labelled
from minbert.training.optimizers import AdamW, RAdam, parameter_groups

FIRST_SCALE = 2.0**14  # of fp16 losses; halved when a gradient overflows, doubled after GROWTH good steps
GROWTH = 1000


class TrainStep:
    """The model, its losses and its optimizer.

    Args:
        recipe: what to do.
        model: is trained in place, on the device it is on.
        rule: how the tasks' losses become one gradient.
        precision: of the products: fp32, tf32, bf16 or fp16.
    """

    def __init__(self, recipe: Recipe, model: MultitaskModel, *, rule: GradientRule, precision: str) -> None:
        training, device = recipe.training, model.device
        self.model, self.rule = model, rule
        self.accumulate, self.decay = training.accumulate, training.ema
        self.losses = {task.name: build_loss(task, device) for task in recipe.tasks}
        self.weighting = WEIGHTINGS[training.loss_weighting](recipe.tasks).to(device)
        self.optimizer = build_optimizer(recipe.optimizer, model, self.weighting)
        named = model.named_parameters()
        self.average = {name: value.detach().clone() for name, value in named} if training.ema else {}
        self.places = {task.name: place for place, task in enumerate(recipe.tasks)}
        self.totals = torch.zeros((len(recipe.tasks), 2), device=device)  # each task's summed loss, and its rows
        self.scale: Tensor | None = None
        if precision == "fp16":
            if not self.optimizer.capturable:
                raise MinbertError("precision fp16 needs the optimizer adamw with bias_correction torch; try bf16")
            self.scale = torch.full((), FIRST_SCALE, device=device)
            self.growth = torch.zeros((), dtype=torch.int32, device=device)
        self.optimizer.clip, self.optimizer.loss_scale = recipe.optimizer.clip, self.scale
        if self.optimizer.capturable and isinstance(model.runner, FusedRunner):
            self.optimizer.copies = model.runner.fused.copies()

    def refresh(self) -> None:
        """To be called when something else than `update` has changed the weights."""
        self.model.runner.refresh()

    def gradient(self, batch: Ready, tasks: int = 0) -> None:
        """The batch's gradient, added to the one that is there, and its losses, added to `totals`; as part of a step of
        so many tasks, or of those that are in it."""
        self.rule(self._weighted_losses(batch, tasks or len(batch.parts)))

    def gradient_apart(self, batches: Sequence[Batch]) -> None:
        """The same for a step's tasks in batches of their own, run when the rule asks for the loss."""
        self.rule(Later({batch.parts[0].task: partial(self._loss_of, batch, len(batches)) for batch in batches}))

    def gradient_cached(self, chunks: Sequence[Batch], tasks: int = 1) -> None:
        """The same for a batch of one task with a contrastive loss, in chunks that are encoded one after the other, as
        part of a step of so many tasks."""
        encoder, (task,) = self.model.encoder, {part.task for chunk in chunks for part in chunk.parts}
        batches = [ready(chunk, encoder) for chunk in chunks]
        labels = torch.cat([batch.parts[0].labels for batch in batches])
        self._train_mode()

        def backward(vectors: Tensor) -> None:
            self.rule(self._weighted({task: self._loss(task, vectors, labels)}, tasks))

        cached_gradient(batches, lambda batch: self.model(batch)[task].float(), backward, self.model.device)

    def loss_of(self, batch: Ready, tasks: int) -> Tensor:
        """The weighted loss of a batch of one task, as part of a step of so many."""
        (loss,) = self._weighted_losses(batch, tasks).values()
        return loss

    def _loss_of(self, batch: Batch, tasks: int) -> Tensor:
        return self.loss_of(ready(batch, self.model.encoder), tasks)

    def _weighted_losses(self, batch: Ready, tasks: int) -> dict[str, Tensor]:
        """What the batch costs, as part of a step of so many tasks."""
        self._train_mode()
        outputs = self.model(batch)
        losses = {part.task: self._loss(part.task, outputs[part.task].float(), part.labels) for part in batch.parts}
        return self._weighted(losses, tasks)

    def _train_mode(self) -> None:
        if not self.model.training:
            self.model.train()

    def _loss(self, task: str, outputs: Tensor, labels: Tensor) -> Tensor:
        """Of one task, counted in `totals`."""
        loss = self.losses[task](outputs, labels)
        rows = labelled(labels).sum(dtype=torch.float32)
        self.totals[self.places[task]].add_(torch.stack([loss.detach() * rows, rows]))
        return loss

    def _weighted(self, losses: Mapping[str, Tensor], tasks: int) -> dict[str, Tensor]:
        weighted: dict[str, Tensor] = self.weighting(losses, tasks)
        if self.accumulate > 1:
            weighted = {task: loss / self.accumulate for task, loss in weighted.items()}
        if self.scale is not None:
            weighted = {task: loss * self.scale for task, loss in weighted.items()}
        return weighted

    def update(self) -> None:
        """Move the weights by the gradients that have come together."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not self.optimizer.copies:
            self.refresh()
        if self.scale is not None and self.optimizer.found_inf is not None:
            torch._amp_update_scale_(self.scale, self.growth, self.optimizer.found_inf, 2.0, 0.5, GROWTH)
        if self.average:
            parameters = dict(self.model.named_parameters())
            values = [parameters[name].detach() for name in self.average]
            torch._foreach_lerp_(list(self.average.values()), values, 1 - self.decay)

    def state(self) -> dict[str, Tensor]:
        """What goes on from step to step beside the weights, the moments and the average."""
        return {"totals": self.totals} | ({} if self.scale is None else {"scale": self.scale, "growth": self.growth})

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.model.parameters(), *self.weighting.parameters()]


class Later(Mapping[str, Tensor]):
    """Losses that are computed at each look-up."""

    def __init__(self, compute: Mapping[str, Callable[[], Tensor]]) -> None:
        self.compute = compute

    def __getitem__(self, task: str) -> Tensor:
        return self.compute[task]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.compute)

    def __len__(self) -> int:
        return len(self.compute)


def build_optimizer(config: OptimizerConfig, model: MultitaskModel, weighting: torch.nn.Module) -> AdamW | RAdam:
    groups = parameter_groups(
        model, lr=config.lr, weight_decay=config.weight_decay, layer_decay=config.layer_decay, head_lr=config.head_lr
    )
    learned = list(weighting.parameters())
    if learned:
        groups.append(
            {
                "params": learned,
                "lr": config.lr if config.head_lr is None else config.head_lr,
                "weight_decay": 0.0,
                "name": "loss weights",
            }
        )
    kinds: dict[str, type[AdamW] | type[RAdam]] = {"adamw": AdamW, "radam": RAdam}
    return kinds[config.kind](
        groups, lr=config.lr, betas=config.betas, eps=config.eps, bias_correction=config.bias_correction
    )
