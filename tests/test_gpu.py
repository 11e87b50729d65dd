"""Training on a GPU: our kernels and CUDA graphs against torch's own kernels one by one, and against themselves.

pytest -m gpu
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minbert.config import SAMPLE
from minbert.errors import MinbertError
from minbert.experiment import train
from minbert.model.encoder import POOLINGS, Encoder, EncoderConfig
from minbert.model.multitask import MultitaskModel, encode_pooled, outputs_of
from minbert.model.pretrained import save_encoder
from minbert.model.runner import FusedRunner, PlainRunner, make_runner
from minbert.training import graphs
from minbert.training.feeding import OneByOne, Recorded, RecordedApart, TaskByTask
from minbert.training.gradients import Surgery, add_gradients
from minbert.training.metrics_log import read_metrics
from minbert.training.trainer import Trainer
from tests import tagger
from tests.runs import CtrlC, Listener, Stopped, small_recipe, small_trainer, unlike, weights_of
from tests.sequences import small_encoder, tokens_of
from tests.tagger import WEIGHTS

pytestmark = pytest.mark.gpu

STILL = {"dropout": 0.0, "encoder_dropout": 0.0}
THIRTY = {"epochs": 4, "log_every": 1}  # 36 steps: 3 batches of each of 3 tasks in an epoch
ALL: dict[str, Any] = {"sampler": {"kind": "all"}}  # 3 steps in an epoch, each with a batch of each task


@pytest.fixture(scope="module", params=["bert", "mpnet"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers of 2 heads of 16, the least that the kernels take, over the words of the sample."""
    return encoder_of(tmp_path_factory.mktemp("encoders") / request.param, request.param)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder_of(tmp_path_factory.mktemp("encoders") / "bert", "bert")


def encoder_of(folder: Path, kind: str) -> Path:
    words = re.findall(r"[a-z]+|[^\sa-z]", " ".join(path.read_text().lower() for path in SAMPLE.glob("*.tsv")))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind == "mpnet":
        special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    vocabulary = [*special, *sorted(set(words))]
    shape: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2, "feed_forward": 64, "positions": 130}
    if kind == "mpnet":
        shape |= {"kind": "mpnet", "segments": 0, "relative_buckets": 32, "pad_id": 1}
    config = EncoderConfig(vocab_size=len(vocabulary), **shape)
    save_encoder(Encoder(config, generator=torch.Generator().manual_seed(1)), folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    return folder


Make = Callable[..., Trainer]


@pytest.fixture
def make(bert: Path, small_data: Path, tmp_path: Path) -> Make:
    def make(*names: str, run: str = "run", encoder: Path = bert, **given: Any) -> Trainer:
        tables = ("model", "sampler", "optimizer", "training", "tasks", "seed")
        recipe = small_recipe(encoder, *names, **{key: given.pop(key) for key in tables if key in given})
        return small_trainer(recipe, tmp_path / run, small_data, device="cuda", **given)

    return make


def losses_of(trainer: Trainer) -> dict[int, dict[str, float]]:
    lines = read_metrics(trainer.run / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def recorded(trainer: Trainer) -> int:
    """How many layouts became graphs."""
    assert type(trainer.feeder) is (RecordedApart if isinstance(trainer.work.rule, Surgery) else Recorded)
    return sum(entry.graph is not None for entry in trainer.feeder.graphs.recorded.values())


def assert_alike(found: Trainer, expected: Trainer, tolerance: float) -> None:
    left, right = losses_of(found), losses_of(expected)
    assert left.keys() == right.keys()
    assert len(left) >= 30
    for step, losses in left.items():
        assert losses == pytest.approx(right[step], rel=tolerance, abs=tolerance), f"step {step}"


def same_bits(one: Trainer, other: Trainer) -> list[str]:
    """The names of weights that differ."""
    left, right = weights_of(one.model), weights_of(other.model)
    return [name for name in left if not torch.equal(left[name], right[name])]


# --- who runs it ----------------------------------------------------------------------------------------------------


def test_kernels_and_graphs_are_for_whoever_can_use_them(make: Make, tiny_encoder: Path) -> None:
    auto = make()
    assert isinstance(auto.model.runner, FusedRunner)
    assert isinstance(auto.feeder, Recorded)
    plain = make(training={"kernels": "plain"})
    assert isinstance(plain.model.runner, PlainRunner)
    assert isinstance(plain.feeder, OneByOne)
    adding = make(training={"accumulate": 2})
    assert isinstance(adding.model.runner, FusedRunner)
    assert isinstance(adding.feeder, OneByOne)
    assert isinstance(make(rule=lambda losses: add_gradients(losses)).feeder, OneByOne)
    assert isinstance(make(encoder=tiny_encoder).model.runner, PlainRunner), "heads of 8"
    assert isinstance(make(**ALL, training={"gradients": "pcgrad"}).feeder, RecordedApart)
    assert isinstance(make(**ALL, training={"gradients": "pcgrad", "accumulate": 2}).feeder, TaskByTask)
    assert isinstance(make(**ALL, training={"gradients": "pcgrad", "kernels": "plain"}).feeder, TaskByTask)


# --- against torch's own kernels ------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "radam": {"optimizer": {"kind": "radam"}},  # its update runs outside of the graphs
    "course": {"optimizer": {"bias_correction": "course", "layer_decay": 0.9, "head_lr": 3e-3}},
    "groups": {"optimizer": {"layer_decay": 0.8, "head_lr": 3e-3, "clip": 0.1}},
    "all": {"sampler": {"kind": "all"}, "training": {"epochs": 12}},
    "mixed": {"sampler": {"kind": "mixed"}, "training": {"epochs": 4}},
    "pcgrad": {**ALL, "training": {"gradients": "pcgrad", "epochs": 12}, "optimizer": {"clip": 0.1, "head_lr": 3e-3}},
    "gradvac": {
        **ALL,
        "training": {"gradients": "gradvac", "loss_weighting": "uncertainty", "ema": 0.9, "epochs": 12},
        "tasks": {"sts": {"pooling": "pooler"}},  # which one task alone reaches
    },
    "cagrad": {**ALL, "training": {"gradients": "cagrad", "epochs": 12}, "optimizer": {"kind": "radam"}},
    "pcgrad, unfreeze": {**ALL, "training": {"gradients": "pcgrad", "mode": "unfreeze", "epochs": 12}},
    "uncertain": {"training": {"loss_weighting": "uncertainty", "ema": 0.9}},
    "unfreeze": {"training": {"mode": "unfreeze", "epochs": 5}},
    "pretrain": {"training": {"mode": "pretrain"}},
    "mean": {"model": {"pooling": "mean", "common_layer": True}},
    "max": {"model": {"pooling": "max"}},
    "pooler": {"model": {"pooling": "pooler"}},
    "weighted": {"model": {"pooling": "weighted", "pooling_weights": WEIGHTS}},
    "two views": {"tasks": {"sts": {"head": "cosine"}, "quora": {"head": "interaction"}}},
    "contrastive": {
        "tasks": {
            "sts": {"head": "cosine", "loss": "info-nce", "temperature": 0.5},
            "quora": {"kind": "contrastive", "head": "simcse", "loss": "mnr", "temperature": 0.5},
        }
    },
    "masked": {"tasks": {"sst": {"kind": "masked"}, "quora": {"kind": "masked", "whole_words": True}}},
    "masked beside": {"tasks": {"sst": {"kind": "masked"}}, "sampler": {"kind": "all"}, "training": {"epochs": 12}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_graphs_train_as_plain_steps_do(make: Make, encoder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout, in fp32: the losses of every step."""
    tagger.use(monkeypatch)
    variant = VARIANTS[name]
    tables = {
        **variant,
        "model": {**STILL, **variant.get("model", {})},
        # An epsilon that keeps Adam from making steps of what is only rounding (keys' biases have no gradient).
        "optimizer": {"eps": 1e-4, **variant.get("optimizer", {})},
        "training": {**THIRTY, "precision": "fp32", **variant.get("training", {})},
    }
    plain = make(encoder=encoder, run="plain", **{**tables, "training": {**tables["training"], "kernels": "plain"}})
    fused = make(encoder=encoder, run="fused", **tables)
    plain.train()
    fused.train()
    assert recorded(fused) > 0
    assert_alike(fused, plain, 2e-3)
    expected = weights_of(plain.model)
    for key, value in weights_of(fused.model).items():
        torch.testing.assert_close(
            value, expected[key], rtol=1e-2, atol=2e-3, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 1e-2), ("bf16", 5e-2), ("fp16", 2e-2)])
def test_low_precision_trains_as_fp32_does(make: Make, precision: str, tolerance: float) -> None:
    exact = make(run="exact", model=STILL, training={**THIRTY, "precision": "fp32", "kernels": "plain"})
    fused = make(run="fused", model=STILL, training={**THIRTY, "precision": precision})
    exact.train()
    fused.train()
    assert recorded(fused) > 0
    assert_alike(fused, exact, tolerance)
    assert all(value.dtype == torch.float32 for value in fused.model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_copies_of_the_weights_are_the_weights(make: Make, precision: str) -> None:
    """The optimizer's kernel writes them; nothing else does between two scorings."""
    trainer = make(training={**THIRTY, "precision": precision})
    trainer.train()
    assert isinstance(trainer.model.runner, FusedRunner)
    copies = trainer.model.runner.fused.copies()
    assert copies
    assert all(torch.equal(value.to(low.dtype), low) for value, low in copies.items())


# --- fp16 -----------------------------------------------------------------------------------------------------------


def test_fp16_starts_when_its_scale_has_come_down(make: Make) -> None:
    """At a scale of 2^40 gradients overflow: it is halved, nothing moves, and nothing is counted, until they do not."""
    trainer = make("sst", training={"precision": "fp16", "epochs": 12, "log_every": 1}, optimizer={"warmup": 0.0})
    assert trainer.work.scale is not None
    trainer.work.scale.fill_(2.0**40)
    before = weights_of(trainer.model)
    seen: list[tuple[float, bool]] = []

    class Watch(Listener):
        def stepped(self, step: int, record: Any) -> None:
            assert trainer.work.scale is not None
            after = weights_of(trainer.model)
            seen.append((trainer.work.scale.item(), any(not torch.equal(before[n], after[n]) for n in before)))
            super().stepped(step, record)

    trainer.watcher = Watch()
    trainer.train()
    waited = [moved for _, moved in seen].index(True)
    assert 5 < waited < 36
    assert [scale for scale, _ in seen[:waited]] == [2.0 ** (39 - step) for step in range(waited)]
    assert seen[-1][0] <= 2.0 ** (40 - waited)
    counts = {float(entry["step"]) for entry in trainer.optimizer.state.values()}
    assert max(counts) <= 36 - waited
    assert all(np.isfinite(loss) for losses in losses_of(trainer).values() for loss in losses.values())


def test_fp16_needs_the_kernel_that_unscales(make: Make) -> None:
    with pytest.raises(MinbertError, match="precision fp16 needs the optimizer adamw"):
        make(training={"precision": "fp16"}, optimizer={"kind": "radam"})


# --- against itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_same_seed_gives_the_same_bits(make: Make, encoder: Path, precision: str) -> None:
    """With dropout."""
    training = {**THIRTY, "precision": precision}
    one, same = (make(run=run, encoder=encoder, training=training) for run in ("one", "same"))
    other = make(run="other", encoder=encoder, training=training, seed=5)
    for trainer in (one, same, other):
        trainer.train()
    assert same_bits(one, same) == []
    assert losses_of(one) == losses_of(same)
    assert same_bits(one, other) != []


@pytest.mark.parametrize("gradients", ["sum", "pcgrad"])
def test_recording_changes_nothing(make: Make, gradients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random numbers of a replay are those of a step that runs as it is: bits, with dropout."""
    tables = {"training": {**THIRTY, "gradients": gradients, "epochs": 12}, **ALL}
    if gradients == "sum":
        tables = {"training": THIRTY}
    whole, none = make(run="whole", **tables), make(run="none", **tables)
    whole.train()
    monkeypatch.setattr(graphs, "MOST", 0)
    none.train()
    assert recorded(whole) > 0
    assert recorded(none) == 0
    assert same_bits(whole, none) == []


def test_scoring_in_between_changes_nothing(make: Make) -> None:
    def evaluate(trainer: list[Trainer]) -> Any:
        def score(model: MultitaskModel) -> dict[str, dict[str, float]]:
            outputs = {name: outputs_of(model, inputs) for name, inputs in trainer[0].data.items()}
            return {"dev": {name: float(np.abs(values).mean()) for name, values in outputs.items()}}

        return score

    for settings in ({}, {"ema": 0.8}):
        holder: list[Trainer] = []
        quiet = make(run="quiet", training={**THIRTY, **settings})
        scored = make(run="scored", training={**THIRTY, **settings, "evaluate_every": 5}, evaluate=evaluate(holder))
        holder.append(scored)
        quiet.train()
        scored.train()
        assert same_bits(quiet, scored) == []


STOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"training": {"precision": "fp16"}},
    "radam": {"optimizer": {"kind": "radam"}},
    "mixed": {"sampler": {"kind": "mixed"}, "training": {"ema": 0.9, "loss_weighting": "uncertainty"}},
    "accumulate": {"training": {"accumulate": 4}},
    "unfreeze": {"training": {"mode": "unfreeze"}},
    "surgery": {**ALL, "training": {"gradients": "gradvac", "epochs": 10}},
    "plain kernels": {"training": {"kernels": "plain"}},
    "masked": {"tasks": {"sst": {"kind": "masked"}, "quora": {"kind": "masked", "whole_words": True}}},
}


@pytest.mark.parametrize("name", STOPS)
def test_a_resumed_run_ends_as_an_uninterrupted_one(bert: Path, small_data: Path, tmp_path: Path, name: str) -> None:
    """Everything in the run's folder, dropout's random numbers included, though other steps are recorded."""
    variant = STOPS[name]
    training = {"epochs": 4, "checkpoint_every": 5, "evaluate_every": 8, "train_sample": 8}
    recipe = small_recipe(bert, **{**variant, "training": {**training, **variant.get("training", {})}})
    train(recipe, out=tmp_path / "whole", data=small_data, device="cuda")
    for stop in (3, 12, 13, 21):
        resume = (tmp_path / "stopped").exists()
        with pytest.raises(Stopped):
            train(
                recipe,
                out=tmp_path / "stopped",
                data=small_data,
                device="cuda",
                resume=resume,
                watcher=Listener(at_step=stop),
            )
    train(recipe, out=tmp_path / "stopped", data=small_data, device="cuda", resume=True)
    assert unlike(tmp_path / "whole", tmp_path / "stopped") == []


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("name", STOPS)
def test_ctrl_c_loses_no_step(bert: Path, small_data: Path, tmp_path: Path, name: str) -> None:
    """Where no checkpoint is due, or one after an evaluation: at any step of a graph there is a whole state."""
    variant = STOPS[name]
    training = {"epochs": 4, "checkpoint_every": 0, "evaluate_every": 8, "train_sample": 8}
    recipe = small_recipe(bert, **{**variant, "training": {**training, **variant.get("training", {})}})
    run, done = tmp_path / "stopped", []
    train(recipe, out=tmp_path / "whole", data=small_data, device="cuda")
    for stop in (3, 8, 12, 13, 21):
        listener = CtrlC(at_step=stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out=run, data=small_data, device="cuda", resume=run.exists(), watcher=listener)
        done += listener.steps
    last = Listener()
    steps = train(recipe, out=run, data=small_data, device="cuda", resume=True, watcher=last).results["steps"]
    assert done + last.steps == list(range(1, steps + 1))
    assert unlike(tmp_path / "whole", run) == []


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.15), ("fp16", 2e-2)])
def test_texts_are_encoded_as_on_a_cpu(kind: str, precision: str, tolerance: float) -> None:
    encoder = small_encoder(kind).eval()
    tokens = tokens_of([*range(1, 40), 64, 65, 130], kind=kind, sort=False)
    expected = encode_pooled(make_runner(encoder, "fp32"), tokens, POOLINGS)
    runner = make_runner(encoder.cuda(), precision)
    assert isinstance(runner, FusedRunner)
    found = encode_pooled(runner, tokens, POOLINGS)
    for how in POOLINGS:
        np.testing.assert_allclose(found[how], expected[how], rtol=0, atol=tolerance, err_msg=how)


def test_reading_holds_one_layer_at_a_time() -> None:
    peaks = []
    for layers in (2, 12):
        encoder = small_encoder(layers=layers).eval().cuda()
        runner, tokens = make_runner(encoder, "bf16"), tokens_of([32] * 2000)
        encode_pooled(runner, tokens, ["mean"])  # what it needs only once
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        encode_pooled(runner, tokens, ["mean"])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 1.2 * peaks[0]
