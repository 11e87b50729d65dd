"""The one training loop.

    Trainer(recipe, model, data, run=folder, evaluate=evaluate, save=save).train()

It is handed everything it does not decide: the model, the data as token sequences, `evaluate` (scores of a model) and
`save` (keep this model under a name). What varies between recipes is behind a seam, never an `if` in the loop: the
sampler says which rows come next, `losses.py` what they cost, `gradients.py` how the tasks' losses become a gradient,
`selection.py` which model is the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from minbert.config import OptimizerConfig, Recipe
from minbert.data.inputs import Batch, Inputs, collate
from minbert.data.samplers import Plan, Sampler, make_sampler, plan
from minbert.errors import MinbertError
from minbert.model.multitask import MultitaskModel
from minbert.training.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from minbert.training.gradients import GradientRule, add_gradients
from minbert.training.losses import WEIGHTINGS, build_loss
from minbert.training.metrics_log import MetricsLog
from minbert.training.optimizers import AdamW, RAdam, parameter_groups
from minbert.training.selection import Selection

Scores = Mapping[str, Mapping[str, float]]
"""By split ("dev", "train") and task."""
WRITE_ERRORS = (OSError, SafetensorError)  # the latter is how safetensors says that the disk is full


class Watcher(Protocol):
    """Is told how the run goes. The CLI draws a progress bar; by default nobody listens."""

    def planned(self, plan: Plan) -> None: ...
    def stepped(self, step: int, record: Mapping[str, Any] | None) -> None: ...
    def evaluated(self, record: Mapping[str, Any]) -> None: ...
    def warn(self, message: str) -> None: ...


class Silent:
    def planned(self, plan: Plan) -> None: ...
    def stepped(self, step: int, record: Mapping[str, Any] | None) -> None: ...
    def evaluated(self, record: Mapping[str, Any]) -> None: ...
    def warn(self, message: str) -> None: ...


class Trainer:
    """A model, its data, and everything needed to stop anywhere and go on as if nothing had happened.

    Args:
        recipe: what to do.
        model: is trained in place, on the device it is on.
        data: the training rows of each task.
        run: folder for metrics.jsonl and checkpoints/.
        evaluate: the scores of a model that is in eval mode, by split and task.
        save: keep the model in this folder of the run ("model", or "models/TASK").
        rule: how the tasks' losses become one gradient.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: MultitaskModel,
        data: Mapping[str, Inputs],
        *,
        run: Path,
        evaluate: Callable[[MultitaskModel], Scores],
        save: Callable[[MultitaskModel, str], None],
        watcher: Watcher | None = None,
        rule: GradientRule = add_gradients,
    ) -> None:
        self.recipe, self.model, self.data, self.run = recipe, model, data, run
        self.evaluate, self.save, self.rule = evaluate, save, rule
        self.watcher: Watcher = watcher or Silent()
        training = recipe.training
        self.sampler: Sampler = make_sampler(
            recipe.sampler,
            {name: inputs.lengths for name, inputs in data.items()},
            epochs=training.epochs,
            batch_size=training.batch_size,
            batch_tokens=training.batch_tokens,
            fractions={task.name: task.fraction for task in recipe.tasks},
            seed=recipe.seed,
        )
        self.plan = plan(self.sampler)
        self.losses = {task.name: build_loss(task) for task in recipe.tasks}
        self.weighting = WEIGHTINGS[training.loss_weighting](recipe.tasks).to(model.device)
        self.optimizer = build_optimizer(recipe.optimizer, model, self.weighting)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.average = (
            {name: value.detach().clone() for name, value in model.named_parameters()} if training.ema else {}
        )
        self.selection = Selection(training)
        self.step = 0  # batches done
        self.rows = 0  # rows in them
        self.seconds = 0.0  # spent in earlier sessions of this run
        self.running: dict[str, tuple[Tensor, int]] = {}  # each task's losses since the last line of the log

    def train(self, *, resume: bool = False) -> None:
        """Run to the end, from the start or from the last checkpoint. Afterwards the model holds the last weights."""
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # dropout draws from torch's own generator: seeded here, put back after
            torch.manual_seed(self.recipe.seed)
            if resume:
                self._restore()
            log = MetricsLog(self.run, name=self.recipe.name, resume_at=self.step if resume else None)
            try:
                self._loop(log)
            finally:
                log.close()

    def _loop(self, log: MetricsLog) -> None:
        self.watcher.planned(self.plan)
        training, started, done_before = self.recipe.training, time.perf_counter() - self.seconds, 0
        for epoch, steps in enumerate(self.sampler.epochs()):
            size = self.plan.epochs[epoch]
            skip = min(max(self.step - done_before, 0), size)
            done_before += size
            if skip == size or self.selection.exhausted:
                continue  # done before this session began
            self._unfreeze(epoch)
            for number, step in enumerate(islice(steps, skip, None), start=skip + 1):
                self._train_step(collate(step, self.data, self.model.encoder.config.pad_id))
                at_end = number == size
                evaluate = at_end or (training.evaluate_every and self.step % training.evaluate_every == 0)
                checkpoint = evaluate or (training.checkpoint_every and self.step % training.checkpoint_every == 0)
                self.seconds = time.perf_counter() - started
                record = None
                if checkpoint or self.step % training.log_every == 0:
                    record = self._log_losses(log, epoch)
                self.watcher.stepped(self.step, record)
                kept = self._evaluate(log, epoch) if evaluate else True
                if checkpoint and kept:  # a model that was not kept comes up again when the run is resumed
                    self._checkpoint(log)
                if self.selection.exhausted:
                    break

    def _train_step(self, batch: Batch) -> None:
        """One batch: forward, losses, gradient; and, every `accumulate` batches, a step of the optimizer."""
        self.model.train()
        with self.autocast():
            outputs = self.model(batch)
        losses = {}
        for part in batch.parts:
            labels = torch.from_numpy(part.labels).to(self.model.device, non_blocking=True)
            losses[part.task] = self.losses[part.task](outputs[part.task].float(), labels)
            total, count = self.running.get(part.task, (torch.zeros((), device=self.model.device), 0))
            self.running[part.task] = (total + losses[part.task].detach() * part.rows, count + part.rows)
        accumulate = self.recipe.training.accumulate
        weighted = self.weighting(losses)
        self.rule({task: loss / accumulate for task, loss in weighted.items()} if accumulate > 1 else weighted)
        self.step += 1
        self.rows += batch.rows
        if self.step % accumulate == 0 or self.step == self.plan.steps:
            self._update()

    def _update(self) -> None:
        config = self.recipe.optimizer
        if config.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip, foreach=True)
        # At the middle of the step: neither the first of a warm-up nor the last of a decay has a rate of 0.
        factor = rate_factor(config, (self.step - 0.5) / self.plan.steps)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            parameters = dict(self.model.named_parameters())
            values = [parameters[name].detach() for name in self.average]
            torch._foreach_lerp_(list(self.average.values()), values, 1 - self.recipe.training.ema)

    def _log_losses(self, log: MetricsLog, epoch: int) -> dict[str, Any] | None:
        """Mean loss of each task since the last line. The one place where the loop waits for the device."""
        if not self.running:
            return None
        losses = {task: float(total) / count for task, (total, count) in self.running.items()}
        self.running = {}
        wrong = [task for task, loss in losses.items() if not math.isfinite(loss)]
        if wrong:
            good = list_checkpoints(self.run / "checkpoints")
            last = f"; the last good checkpoint is {good[-1].name}" if good else ""
            raise MinbertError(f"the loss of {wrong[0]} is {losses[wrong[0]]} at step {self.step}{last}")
        record = {
            "kind": "train",
            "step": self.step,
            "epoch": epoch + 1,
            "loss": losses,
            "lr": self.optimizer.param_groups[0]["lr"],
            "rows": self.rows,
            "seconds": round(self.seconds, 3),
        }
        self._write(log, record)
        return record

    def _evaluate(self, log: MetricsLog, epoch: int) -> bool:
        """Score the model and keep it where it is the best so far; false if it should have been kept and was not."""
        self.model.eval()
        kept = []
        with self.averaged(), self.autocast():
            scores = self.evaluate(self.model)
            best_before = dict(self.selection.best)
            names = self.selection.update(scores["dev"])
            for name in names:
                try:
                    self.save(self.model, name)
                    kept.append(name)
                except WRITE_ERRORS as error:
                    self.selection.best = best_before  # what was lost is not the one to beat
                    self.watcher.warn(f"the model could not be saved ({_reason(error)}); training goes on")
        record = {
            "kind": "evaluation",
            "step": self.step,
            "epoch": epoch + 1,
            "scores": {split: dict(values) for split, values in scores.items()},
            "aggregate": self.selection.aggregate(scores["dev"]),
            "kept": kept,
            "seconds": round(self.seconds, 3),
        }
        self._write(log, record)
        self.watcher.evaluated(record)
        return kept == names

    def _write(self, log: MetricsLog, record: Mapping[str, Any]) -> None:
        try:
            log.write(record)
        except OSError as error:
            self.watcher.warn(f"metrics.jsonl not written at step {self.step} ({_reason(error)}); training goes on")

    def _checkpoint(self, log: MetricsLog) -> None:
        state = {"step": self.step, "rows": self.rows, "seconds": self.seconds, "selection": self.selection.state()}
        try:
            log.sync()
            save_checkpoint(
                self.run / "checkpoints",
                self.step,
                modules=self._modules(),
                optimizer=self.optimizer,
                tensors={"average": self.average, "gradient": self._gradients()},
                state=state,
                keep=self.recipe.training.keep,
            )
        except WRITE_ERRORS as error:
            good = [path.name for path in list_checkpoints(self.run / "checkpoints")]
            last = f"the last good one is {good[-1]}" if good else "there is none yet"
            self.watcher.warn(f"checkpoint not saved at step {self.step} ({_reason(error)}); {last}; training goes on")

    def _restore(self) -> None:
        found = list_checkpoints(self.run / "checkpoints")
        if not found:
            return  # stopped before the first checkpoint: start again, the same way
        gradients: dict[str, Tensor] = {}
        state = load_checkpoint(
            found[-1],
            modules=self._modules(),
            optimizer=self.optimizer,
            tensors={"average": self.average, "gradient": gradients},
        )
        self.step, self.rows, self.seconds = int(state["step"]), int(state["rows"]), float(state["seconds"])
        self.selection.restore(state["selection"])
        for name, parameter in self._parameters():
            if name in gradients:  # one without a gradient stays so: the optimizer leaves it alone
                parameter.grad = gradients[name].to(parameter.device, copy=True)

    def _modules(self) -> dict[str, torch.nn.Module]:
        return {"model": self.model, "weighting": self.weighting}

    def _gradients(self) -> dict[str, Tensor]:
        """Gradients that wait for further batches to be added."""
        return {name: value.grad for name, value in self._parameters() if value.grad is not None}

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for prefix, module in self._modules().items():
            yield from module.named_parameters(prefix)

    def _unfreeze(self, epoch: int) -> None:
        """Which parts of the encoder learn in this epoch: all, none, or the layers from the top down, one more each."""
        mode, encoder = self.recipe.training.mode, self.model.encoder
        trained = {"finetune": len(encoder.layers) + 1, "pretrain": 0, "unfreeze": epoch}[mode]
        encoder.requires_grad_(trained > len(encoder.layers))
        for layer in list(encoder.layers)[len(encoder.layers) - min(trained, len(encoder.layers)) :]:
            layer.requires_grad_(True)
        encoder.pooler.requires_grad_(trained > 0)

    def autocast(self) -> torch.autocast:
        precision, device = self.recipe.training.precision, self.model.device.type
        low = precision == "bf16" or (precision == "auto" and device == "cuda")
        return torch.autocast(device, torch.bfloat16, enabled=low)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The moving average in the model's place, for as long as the block lasts."""
        if not self.average:
            yield
            return
        parameters = dict(self.model.named_parameters())
        kept = {name: parameters[name].detach().clone() for name in self.average}
        with torch.no_grad():
            for name, value in self.average.items():
                parameters[name].copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in kept.items():
                    parameters[name].copy_(value)


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


def rate_factor(config: OptimizerConfig, progress: float) -> float:
    """The learning rate's factor when `progress` (0 to 1) of the run is done: warm-up, then the schedule."""
    if progress < config.warmup:
        return progress / config.warmup
    rest = (progress - config.warmup) / (1 - config.warmup) if config.warmup < 1 else 1.0
    return {
        "constant": 1.0,
        "linear": 1 - rest,
        "cosine": 0.5 * (1 + math.cos(math.pi * rest)),
    }[config.schedule]


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
