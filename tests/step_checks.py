"""What `test_graphs.py` has checked in Triton's interpreter: steps over batches of a fixed layout, with our kernels.

python -m tests.step_checks NAME...         # with TRITON_INTERPRET=1
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from minbert.data.inputs import Inputs, collate
from minbert.data.streams import Part
from minbert.data.tokenizer import Truncation
from minbert.model.encoder import POOLINGS
from minbert.model.multitask import ready
from minbert.model.runner import FusedRunner
from minbert.training import graphs, task_graphs
from minbert.training.gradients import PCGrad, add_gradients
from minbert.training.graphs import Graphs, Staged, lay_out, layout_of
from minbert.training.step import TrainStep
from minbert.training.task_graphs import TaskGraphs
from tests.fused_checks import all_near, near
from tests.interpreter import Checks
from tests.laid_out import batch_of, masked_batch_of, masked_recipe_of, model_of, recipe_of
from tests.sequences import gradients, tokens_of

checks = Checks("tests.step_checks")
SMALL = patch.object(graphs, "LEAST", 64)  # layouts are rounded up to 256 tokens, which takes long here


def step_of(
    *, fused: bool, pooling: str = "cls", device: torch.device, masked: bool = False, **tables: Any
) -> TrainStep:
    recipe = masked_recipe_of(**tables) if masked else recipe_of(**tables)
    model = model_of(recipe, pooling).to(device)
    if fused:
        model.runner = FusedRunner(model.encoder, "fp32")
    return TrainStep(recipe, model, rule=add_gradients, precision="fp32")


class Arrived:
    """An event on a device that has none."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def staged(batch: Any, config: Any, rates: int) -> Staged:
    layout = layout_of(batch, rates)
    block = torch.full((layout.size,), -7, dtype=torch.int32)  # as if another batch had been there
    lay_out(batch, layout, config, block.numpy())
    return Staged(layout, block, batch.rows, Arrived())  # type: ignore[arg-type]


@checks.add_each({how: how for how in (*POOLINGS, "weighted")})
def a_laid_out_batch_is_the_batch(device: torch.device, pooling: str) -> None:
    """Losses and gradients: what fills the layout counts for nothing, whatever is pooled."""
    batch = batch_of([3, 9, 1, 5, 7], [2, 4, 4, 8, 1, 5])
    if pooling == "weighted":
        weights = np.random.default_rng(3).uniform(0.5, 2, len(batch.tokens.ids)).astype(np.float32)
        batch = replace(batch, tokens=replace(batch.tokens, weights=weights))
    plain, fused = (step_of(fused=fused, pooling=pooling, device=device) for fused in (False, True))
    plain.gradient(ready(batch, plain.model.encoder))
    with SMALL:
        laid = staged(batch, fused.model.encoder.config, 2)
    assert laid.layout.tokens > len(batch.tokens.ids)
    assert sum(rows for _, _, rows in laid.layout.parts) > batch.rows
    fused.gradient(laid.layout.batch(laid.block.to(device)))
    near(fused.totals, plain.totals, "losses")
    assert fused.totals[:, 1].tolist() == [5.0, 3.0], "rows that are there"
    all_near(gradients(fused.model), gradients(plain.model))


@checks.add
def a_laid_out_batch_of_long_sequences(device: torch.device) -> None:
    batch = batch_of([70, 3], [2, 66])
    plain, fused = (step_of(fused=fused, pooling="mean", device=device) for fused in (False, True))
    plain.gradient(ready(batch, plain.model.encoder))
    with SMALL:
        laid = staged(batch, fused.model.encoder.config, 2)
    assert not laid.layout.short
    fused.gradient(laid.layout.batch(laid.block.to(device)))
    near(fused.totals, plain.totals, "losses")
    all_near(gradients(fused.model), gradients(plain.model))


CONTRASTIVE = {"sst": {}, "sts": {"head": "cosine", "loss": "info-nce", "temperature": 0.2}}


@checks.add
def a_laid_out_contrastive_batch(device: torch.device) -> None:
    """Rows that fill the layout are no candidates, though they are texts of the batch."""
    batch = batch_of([3, 9, 1], [2, 4, 4, 8, 1, 5, 3, 3, 7, 2])
    plain, fused = (step_of(fused=fused, pooling="mean", device=device, tasks=CONTRASTIVE) for fused in (False, True))
    plain.gradient(ready(batch, plain.model.encoder))
    with SMALL:
        laid = staged(batch, fused.model.encoder.config, 2)
    assert {task: rows for task, _, rows in laid.layout.parts} == {"sst": 8, "sts": 8}
    fused.gradient(laid.layout.batch(laid.block.to(device)))
    near(fused.totals, plain.totals, "losses")
    assert fused.totals[1, 0] > 0
    all_near(gradients(fused.model), gradients(plain.model))


@checks.add
def copies_of_a_text_are_dropped_out_differently(device: torch.device) -> None:
    recipe = recipe_of(tasks={"texts": {"like": "sst", "kind": "contrastive"}})
    tokens = tokens_of([5, 3, 9], sort=False)
    inputs = Inputs(recipe.tasks[0], (tokens, tokens), np.zeros(3), Truncation())
    batch = collate((Part("texts", np.arange(3)),), {"texts": inputs})
    for dropout, same in ((0.0, True), (0.1, False)):
        model = model_of(recipe, "mean", dropout=dropout).to(device).train()
        model.runner = FusedRunner(model.encoder, "fp32")
        first, second = model(ready(batch, model.encoder))["texts"].detach().chunk(2, dim=1)
        apart = (first - second).abs().amax(dim=1)
        assert (apart < 1e-5).all() if same else (apart > 1e-2).all(), f"dropout {dropout}: {apart.tolist()}"


@checks.add
def chunks_are_dropped_out_the_same_way_twice(device: torch.device) -> None:
    """The seeds of our kernels' dropout come from the random state that is put back."""
    recipe = recipe_of(tasks=CONTRASTIVE)
    model = model_of(recipe, "mean", dropout=0.1).to(device)
    model.runner = FusedRunner(model.encoder, "fp32")
    step = TrainStep(recipe, model, rule=add_gradients, precision="fp32")
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda _module, _given, found: seen.append(found["sts"].detach().clone()))
    step.gradient_cached([batch_of([], [3, 5, 2, 4], seed=seed) for seed in (1, 2)])
    assert len(seen) == 4
    assert torch.equal(seen[0], seen[2]), "first chunk"
    assert torch.equal(seen[1], seen[3]), "second chunk"
    step.gradient_cached([batch_of([], [3, 5, 2, 4], seed=1)])
    assert not torch.equal(seen[4], seen[0]), "another step, other dropout"


@checks.add_each({"alone": [], "beside-another-task": [4, 2, 9]})
def a_laid_out_batch_of_masked_tokens(device: torch.device, one: list[int]) -> None:
    """Tokens to guess that are not there count for nothing, in the token table's gradient too."""
    batch = masked_batch_of([3, 9, 1, 5, 7, 20], one)
    plain, fused = (step_of(fused=fused, device=device, masked=True) for fused in (False, True))
    plain.gradient(ready(batch, plain.model.encoder))
    with SMALL:
        laid = staged(batch, fused.model.encoder.config, 2)
    (_, _, guessed) = laid.layout.parts[-1]
    assert guessed > batch.parts[-1].rows == 7
    fused.gradient(laid.layout.batch(laid.block.to(device)))
    near(fused.totals, plain.totals, "losses")
    assert fused.totals[:, 1].tolist() == [len(one), 7.0], "tokens that are there"
    found, expected = gradients(fused.model), gradients(plain.model)
    assert expected["encoder.embeddings.tokens.weight"].any()
    all_near(found, expected)


@checks.add
def unrecorded_graphs_are_steps(device: torch.device) -> None:
    """Three batches of two layouts, updates included; the rates come with the batch."""
    settings: dict[str, Any] = {"optimizer": {"lr": 1e-3, "clip": 0.5, "eps": 1e-3}}  # so that noise is not magnified
    plain, fused = (step_of(fused=fused, device=device, **settings) for fused in (False, True))
    runner = Graphs(fused)
    rates = [1e-3] * len(fused.optimizer.param_groups)
    with SMALL, patch.object(graphs, "MOST", 0):  # none is recorded
        for seed, one in enumerate(([3, 9, 1], [5, 2], [4, 1, 7])):
            batch = batch_of(one, [2, 4], seed=seed)
            plain.gradient(ready(batch, plain.model.encoder))
            plain.update()
            runner.run(staged(batch, fused.model.encoder.config, len(rates)), rates)
    near(fused.totals, plain.totals, "losses")
    assert runner.recorded == {}
    expected = dict(plain.model.named_parameters())
    for name, value in fused.model.named_parameters():
        near(value, expected[name], name)
        assert value.grad is None


@checks.add_each({"as they come": "", "recorded": "passes", "all recorded": "passes, updates"})
def tasks_by_themselves_are_surgery(device: torch.device, recorded: str) -> None:
    """Five steps of two tasks, of three layouts, one step with one task only; updates included. What a graph does is
    done here by the work that it would hold."""
    settings: dict[str, Any] = {"optimizer": {"lr": 1e-3, "clip": 0.5, "eps": 1e-3}}
    plain, fused = (step_of(fused=fused, pooling="pooler", device=device, **settings) for fused in (False, True))
    names = list(plain.losses)
    for step in (plain, fused):
        shared = [value for name, value in step.model.named_parameters() if not name.startswith("heads.")]
        step.rule = PCGrad(shared, names, seed=3)
    assert isinstance(fused.rule, PCGrad)
    runner = TaskGraphs(fused, fused.rule)
    rates = [1e-3] * len(fused.optimizer.param_groups)
    made: list[Any] = []

    def held(work: Any, pool: Any) -> Any:
        made.append(pool)
        return SimpleNamespace(replay=work, pool=lambda: "pool")

    with ExitStack() as patches:
        patches.enter_context(SMALL)
        patches.enter_context(patch.object(graphs, "MOST", 9 if recorded else 0))
        patches.enter_context(patch.object(task_graphs, "record", held))
        if "updates" in recorded:
            for name, value in (("capturable", True), ("reserve", lambda _: None), ("settle", lambda _: [])):
                patches.enter_context(patch.object(type(fused.optimizer), name, value))
        texts = (([3, 9, 1], [2, 4]), ([5, 2], [4, 4]), ([], [4, 7]), ([40, 2], [2, 4]), ([4, 2], [7, 3]))
        for seed, (one, two) in enumerate(texts):
            batches = [batch_of(*lengths, seed=seed) for lengths in ((one, []), ([], two)) if one or lengths[1]]
            plain.gradient_apart(batches)
            plain.update()
            runner.run([staged(batch, fused.model.encoder.config, len(rates)) for batch in batches], rates)
            near(fused.totals, plain.totals, "losses")
            expected = dict(plain.model.named_parameters())
            for name, value in fused.model.named_parameters():
                near(value, expected[name], f"step {seed}: {name}")
                assert value.grad is None
    # Passes: the first task with another beside it, the second, the second alone, a longer batch of the first. Updates: with
    # the first task's head, and without it (the second has no weights)
    counts = (len(runner.recorded), len(runner.updates), len(made))
    assert counts == (4 * ("passes" in recorded), 2 * ("updates" in recorded), sum(counts[:2])), counts
    assert made[:2] == [None, "pool"][: len(made)] and set(made[1:]) <= {"pool"}
    assert fused.optimizer.rates is None
    assert isinstance(plain.rule, PCGrad)
    assert plain.rule.state["steps"] == fused.rule.state["steps"] == 5


if __name__ == "__main__":
    checks.main()
