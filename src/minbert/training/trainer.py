"""The one training loop.

    Trainer(recipe, model, data, run=folder, evaluate=evaluate, save=save).train()

It is handed everything it does not decide: the model, the data as token sequences, `evaluate` (scores of a model) and
`save` (keep this model under a name). What varies between recipes is behind a seam, never an `if` in the loop: the
sampler says which rows come next, `losses.py` what they cost, `gradients.py` how the tasks' losses become a gradient,
`selection.py` which model is the best. What one step does is `step.py`; `feeding.py` makes its batches and runs it, on a
GPU as one launch (`graphs.py`).
"""

from __future__ import annotations

import math
import shutil
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
from minbert.data.inputs import Inputs
from minbert.data.plan import Plan, plan
from minbert.data.repeats import number_texts
from minbert.data.samplers import Sampler, make_sampler
from minbert.errors import MinbertError
from minbert.machine import choose_precision, matrix_precision, own_stream, share_gpu
from minbert.model.multitask import MultitaskModel
from minbert.training.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from minbert.training.feeding import make_feeder
from minbert.training.gradients import GradientRule, Surgery, make_rule
from minbert.training.metrics_log import MetricsLog
from minbert.training.selection import SNAPSHOTS, Selection, snapshot_folder
from minbert.training.step import TrainStep
from minbert.training.stopping import Stop

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
        save: keep the model in this folder of the run ("model", "models/TASK" or "models/step-NUMBER").
        rule: how the tasks' losses become one gradient; default is what the recipe says.
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
        rule: GradientRule | None = None,
    ) -> None:
        self.recipe, self.model, self.data, self.run = recipe, model, data, run
        self.evaluate, self.save = evaluate, save
        self.watcher: Watcher = watcher or Silent()
        training = recipe.training
        self.sampler: Sampler = make_sampler(
            recipe.sampler,
            {task.name: data[task.name].lengths for task in recipe.trained},
            epochs=training.epochs,
            batch_size=training.batch_size,
            batch_tokens=training.batch_tokens,
            fractions={task.name: task.fraction for task in recipe.trained},
            texts={task.name: number_texts(data[task.name].views) for task in recipe.trained if task.distinct_batches},
            max_steps=training.max_steps,
            seed=recipe.seed,
        )
        self.plan = plan(self.sampler)
        self.precision = choose_precision(training.precision, model.device)
        model.use(self.precision, kernels=training.kernels)
        self.work = TrainStep(recipe, model, rule=rule or make_rule(recipe, model), precision=self.precision)
        self.losses, self.weighting = self.work.losses, self.work.weighting
        self.optimizer, self.average = self.work.optimizer, self.work.average
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.feeder = make_feeder(self.work, data, recipe.training)
        self.selection = Selection(training, {task.name: task for task in recipe.tasks})
        self.step = 0  # batches done
        self.rows = 0  # rows in them
        self.seconds = 0.0  # spent in earlier sessions of this run
        self.layers_trained: int | None = None  # of the encoder, from the top, its embeddings counted as one
        self.stop = Stop()
        self.unscored = False  # the evaluation after the last step was broken off

    def train(self, *, resume: bool = False) -> None:
        """Run to the end, from the start or from the last checkpoint. Afterwards the model holds the last weights.

        Ctrl-C ends it after the step that is under way, with a checkpoint; a second one at once, without.
        """
        device = self.model.device
        devices = [device] if device.type == "cuda" else []
        # Dropout draws from torch's own generator: seeded here, put back after.
        with (
            torch.random.fork_rng(devices),
            share_gpu(device),
            matrix_precision(self.precision),
            own_stream(device),
        ):
            torch.manual_seed(self.recipe.seed)
            if resume:
                self._restore()
            self.work.refresh()
            resume_at = self.step if resume else None
            log = MetricsLog(self.run, name=self.recipe.name, resume_at=resume_at, scored=not self.unscored)
            try:
                with Stop() as self.stop:
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
            if self.unscored and self.step <= done_before:  # where the session before was stopped
                self._settle(log, epoch, evaluate=True, checkpoint=True)
            if self.stop.asked:
                return
            if skip == size or self.selection.exhausted:
                continue  # done before this session began
            self._unfreeze(epoch)
            for number, batch in enumerate(self.feeder.batches(islice(steps, skip, None)), start=skip + 1):
                self._train_step(batch)
                at_end = number == size
                evaluate = at_end or (training.evaluate_every and self.step % training.evaluate_every == 0)
                checkpoint = evaluate or (training.checkpoint_every and self.step % training.checkpoint_every == 0)
                self.seconds = time.perf_counter() - started
                record = None
                if checkpoint or self.step % training.log_every == 0:
                    record = self._log_losses(log, epoch)
                self.watcher.stepped(self.step, record)
                self._settle(log, epoch, evaluate=bool(evaluate), checkpoint=bool(checkpoint))
                if self.stop.asked:
                    return
                if self.selection.exhausted:
                    break

    def _settle(self, log: MetricsLog, epoch: int, *, evaluate: bool, checkpoint: bool) -> None:
        """What is due after a step, its evaluation and its checkpoint; and a checkpoint where the run is stopped."""
        kept = self._evaluate(log, epoch) if evaluate else True
        self.unscored = kept is None
        if checkpoint and kept:  # a model that was not kept comes up again when the run is resumed
            self._checkpoint(log)
        elif self.unscored or (self.stop.asked and not checkpoint):
            self._losses()  # a state that is good for nothing is not kept
            self._checkpoint(log, stopped=True)

    def _train_step(self, batch: Any) -> None:
        """One batch and, every `accumulate` batches, a step of the optimizer."""
        self.step += 1
        update = self.step % self.recipe.training.accumulate == 0 or self.step == self.plan.steps
        # At the middle of the step: neither the first of a warm-up nor the last of a decay has a rate of 0.
        optimizer = self.recipe.optimizer
        factor = rate_factor(optimizer, self.plan.progress(self.step, self.recipe.turns if optimizer.restart else 1))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.rows += batch.rows
        self.feeder.run(batch, update=update)

    def _log_losses(self, log: MetricsLog, epoch: int) -> dict[str, Any] | None:
        """Mean loss of each task since the last line. The one place where the loop waits for the device."""
        losses = self._losses()
        self.work.totals.zero_()
        if not losses:
            return None
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

    def _losses(self) -> dict[str, float]:
        """Mean loss of each task since the last line of the log; one that is no number is an error."""
        losses = {
            task: total / rows
            for task, (total, rows) in zip(self.work.places, self.work.totals.tolist(), strict=True)
            if rows
        }
        wrong = [task for task, loss in losses.items() if not math.isfinite(loss)]
        if wrong:
            good = list_checkpoints(self.run / "checkpoints")
            last = f"; the last good checkpoint is {good[-1].name}" if good else ""
            raise MinbertError(f"the loss of {wrong[0]} is {losses[wrong[0]]} at step {self.step}{last}")
        return losses

    def _evaluate(self, log: MetricsLog, epoch: int) -> bool | None:
        """Score the model and keep it where it is the best so far; false if it should have been kept and was not, None
        if Ctrl-C came before it was scored: that may take minutes, and a run resumed begins with it."""
        self.model.eval()
        with self.averaged():
            scores = self.stop.unless_asked(lambda: self.evaluate(self.model))
            if scores is None:
                return None
            best_before, snapshots_before = dict(self.selection.best), self.selection.snapshots
            names = self.selection.update(scores["dev"])
            kept = [name for name in names if self._keep(name)]
            if kept != names:
                self.selection.best = best_before  # what was lost is not the one to beat
            snapshot = self.selection.snapshot(self.step, scores["dev"])
            lost = snapshot is not None and not self._keep(snapshot)
            if lost:
                self.selection.snapshots = snapshots_before
        record = {
            "kind": "evaluation",
            "step": self.step,
            "epoch": epoch + 1,
            "scores": {split: dict(values) for split, values in scores.items()},
            "aggregate": self.selection.aggregate(scores["dev"]),
            "kept": kept,
            "seconds": round(self.seconds, 3),
        }
        self.work.refresh()  # the copies that scoring used may have been those of the moving average
        self._write(log, record)
        self.watcher.evaluated(record)
        return kept == names and not lost

    def _keep(self, name: str) -> bool:
        try:
            self.save(self.model, name)
        except WRITE_ERRORS as error:
            self.watcher.warn(f"the model could not be saved ({_reason(error)}); training goes on")
            return False
        return True

    def _write(self, log: MetricsLog, record: Mapping[str, Any]) -> None:
        try:
            log.write(record)
        except OSError as error:
            self.watcher.warn(f"metrics.jsonl not written at step {self.step} ({_reason(error)}); training goes on")

    def _checkpoint(self, log: MetricsLog, *, stopped: bool = False) -> None:
        state = {
            "step": self.step,
            "rows": self.rows,
            "seconds": self.seconds,
            "selection": self.selection.state(),
            "unscored": self.unscored,
        }
        try:
            log.sync()
            save_checkpoint(
                self.run / "checkpoints",
                self.step,
                modules=self._modules(),
                optimizer=self.optimizer,
                tensors=self._tables(self._gradients()),
                state=state,
                keep=self.recipe.training.keep,
                stopped=stopped,
            )
            self._remove_snapshots()
        except WRITE_ERRORS as error:
            good = [path.name for path in list_checkpoints(self.run / "checkpoints")]
            last = f"the last good one is {good[-1]}" if good else "there is none yet"
            then = "the run ends" if stopped else "training goes on"
            self.watcher.warn(f"checkpoint not saved at step {self.step} ({_reason(error)}); {last}; {then}")

    def _remove_snapshots(self) -> None:
        """Those that better ones have replaced; only now, when no checkpoint to resume from counts on them."""
        if not self.recipe.training.snapshots:
            return
        kept = {snapshot_folder(step) for step in self.selection.snapshots}
        for folder in (self.run / SNAPSHOTS).glob("step-*"):
            if f"{SNAPSHOTS}/{folder.name}" not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _restore(self) -> None:
        found = list_checkpoints(self.run / "checkpoints")
        if not found:
            return  # stopped before the first checkpoint: start again, the same way
        gradients: dict[str, Tensor] = {}
        state = load_checkpoint(
            found[-1],
            modules=self._modules(),
            optimizer=self.optimizer,
            tensors=self._tables(gradients),
        )
        self.step, self.rows, self.seconds = int(state["step"]), int(state["rows"]), float(state["seconds"])
        self.selection.restore(state["selection"])
        self.unscored = bool(state.get("unscored"))
        self._remove_snapshots()  # where the end came before that
        for name, parameter in self._parameters():
            if name in gradients:  # one without a gradient stays so: the optimizer leaves it alone
                parameter.grad = gradients[name].to(parameter.device, copy=True)

    def _modules(self) -> dict[str, torch.nn.Module]:
        return {"model": self.model, "weighting": self.weighting}

    def _tables(self, gradients: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds beside the modules and the optimizer's moments."""
        return {
            "average": self.average,
            "rule": self._rule_state(),
            "gradient": gradients,
            "step": self.work.state(),
        }

    def _rule_state(self) -> dict[str, Tensor]:
        return self.work.rule.state if isinstance(self.work.rule, Surgery) else {}

    def _gradients(self) -> dict[str, Tensor]:
        """Gradients that wait for further batches to be added."""
        return {name: value.grad for name, value in self._parameters() if value.grad is not None}

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for prefix, module in self._modules().items():
            yield from module.named_parameters(prefix)

    def _unfreeze(self, epoch: int) -> None:
        """Which parts of the encoder learn in this epoch: all, none, or the layers from the top down, one more each."""
        mode, encoder = self.recipe.training.mode, self.model.encoder
        everything = len(encoder.layers) + 1
        trained = {"finetune": everything, "pretrain": 0, "unfreeze": min(epoch, everything)}[mode]
        if trained == self.layers_trained:
            return
        self.layers_trained = trained
        encoder.requires_grad_(trained == everything)
        for layer in list(encoder.layers)[len(encoder.layers) - min(trained, len(encoder.layers)) :]:
            layer.requires_grad_(True)
        encoder.pooler.requires_grad_(trained > 0)
        self.feeder.clear()

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
