"""The benchmarks work: each one in a few steps with a tiny encoder, and what becomes of their files."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench import curves, gpu, lab, models, numbers, pairs, plots, profile, scores, summary, tables, train
from bench.measure import Stopwatch, Timed, Timing, matrix_rate, ratio, save, spread, take_turns
from bench.mix import task_copies, task_mix
from bench.models import SHAPES, TOKENIZER, Model, find_model
from bench.serve import reading_alike
from bench.settings import Settings

from minbert.evaluation.mistakes import BOLD, TaskMistakes, write_mistakes
from minbert.evaluation.slices import Rate, Slice
from minbert.experiment import new_model
from minbert.model.encoder import EncoderConfig
from minbert.model.pretrained import load_encoder
from minbert.recipes import parse_recipe
from minbert.training.trainer import Trainer

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent


@pytest.fixture
def settings(tmp_path: Path, tiny_encoder: Path) -> Settings:
    folders = {"minilm": tiny_encoder}
    return Settings(CPU, tmp_path / "work", tmp_path / "out", folders=folders, quick=True, command="python -m bench.it")


def test_rounds_become_a_median_with_its_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "rounds": [3.0, 1.0, 2.0]}
    found = ratio(spread([4.0, 9.0, 5.0]), spread([2.0, 3.0, 2.5]))
    assert found == {"median": 2.0, "min": 2.0, "max": 3.0, "rounds": [2.0, 3.0, 2.0]}  # of the medians, 5 and 2.5


def test_a_stopwatch_notes_the_end_of_the_warm_up_and_of_each_round() -> None:
    watch = Stopwatch(Timing(warm_up=2, rounds=2, steps=3), CPU)
    assert [watch.tick(step) for step in range(1, 9)] == [False] * 7 + [True]
    assert len(watch.seconds) == 2 and min(watch.seconds) >= 0


def test_contenders_take_turns_in_alternating_order() -> None:
    order: list[str] = []

    def way(name: str) -> Timed:
        order.append(name)
        return Timed((float(len(order)),))

    found = take_turns({"a": lambda: way("a"), "b": lambda: way("b")}, 2)
    assert order == ["a", "b", "b", "a"]
    assert found["a"].seconds == (1.0, 4.0) and list(found) == ["a", "b"]


def test_the_matrix_rate_counts_two_operations_for_each_product() -> None:
    found = matrix_rate(CPU, size=32, rounds=2)
    assert found["precision"] == "float32" and found["flops_per_second"]["median"] > 0


def test_the_matrix_parameters_are_those_of_the_layers(tiny_encoder: Path, tmp_path: Path) -> None:
    model = find_model("minilm", tmp_path, tiny_encoder)
    layers = load_encoder(tiny_encoder).layers
    assert model.matrix_parameters == sum(weight.numel() for weight in layers.parameters() if weight.dim() == 2)
    assert model.flops(tokens=10, squares=50) == 6 * model.matrix_parameters * 10 + 12 * 2 * 32 * 50


def test_random_weights_stand_in_for_an_encoder_that_is_not_there(
    tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINBERT_HOME", str(tmp_path / "nothing"))
    small = {"vocab_size": 5000, "width": 16, "layers": 1, "heads": 2, "feed_forward": 16}
    monkeypatch.setitem(models.SHAPES, "mpnet", replace(SHAPES["mpnet"], **small))
    model = find_model("mpnet", tmp_path, None, tiny_encoder)
    assert model.weights == "random" and "minilm" in model.vocabulary
    found = _compare(model, tmp_path)
    assert found["peer"]["notes"]["attention"] == "eager"  # transformers has no other for MPNet
    assert found["ratio"]["median"] > 0


def test_the_steps_are_those_of_our_trainer(tiny_encoder: Path, tmp_path: Path) -> None:
    workload = task_mix(tiny_encoder, None).workload(8, Timing(3, 2, 4))
    _, model, _ = new_model(workload.recipe, CPU)
    trainer = Trainer(
        workload.recipe, model, workload.inputs, run=tmp_path, evaluate=lambda _: {}, save=lambda _model, _name: None
    )
    theirs = list(islice(chain.from_iterable(trainer.sampler.epochs()), 8))
    assert trainer.plan.steps > workload.timing.total == len(workload.steps)  # the last one timed ends no epoch
    assert workload.steps == [*workload.timed[:3], *workload.timed]
    for (ours,), (other,) in zip(workload.timed, theirs, strict=True):
        assert ours.task == other.task and np.array_equal(ours.rows, other.rows)


def test_the_counts_of_a_round_are_those_of_its_rows(tiny_encoder: Path) -> None:
    workload = task_mix(tiny_encoder, None).workload(8, Timing(1, 2, 2))
    first = workload.timed[:2]
    lengths = [int(workload.inputs[part.task].lengths[row]) for (part,) in first for row in part.rows]
    found = workload.rounds()[0]
    assert (found.examples, found.texts) == (len(lengths), len(lengths))
    assert (found.tokens, found.squares) == (sum(lengths), sum(length**2 for length in lengths))


def test_copies_of_a_task_are_all_in_every_step(tiny_encoder: Path) -> None:
    workload = task_copies(tiny_encoder, None, 4).workload(16, Timing(1, 1, 2))
    assert [len(step) for step in workload.steps] == [4, 4, 4]
    assert workload.count(workload.steps[:1]).examples == 64


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_and_leaves_its_file(
    tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--quick", "--data", "embedded", "--minilm", str(tiny_encoder)]
    words += ["--only", "a,d,e,f,i,j", "--out", str(tmp_path), "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["bench.gpu", *words])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert "not measured" in said.out  # quick runs are no measurements
    names = ("train", "heads", "scaling", "tasks", "curves", "profile-plain", "profile-auto")
    files = {name: json.loads((tmp_path / f"{name}-cpu.json").read_text()) for name in names}
    assert files["train"]["command"] == "python -m bench.train --device cpu --data DIR --quick --steps 1"
    assert str(tmp_path) not in json.dumps(files)
    assert files["train"]["models"]["minilm"]["timing"]["steps"] == 1
    assert list(files["scaling"]["models"]["minilm"]["batches"]) == ["4", "8"]
    assert files["profile-plain"]["cpu"][0]["milliseconds"] > 0
    _check_documents(tmp_path, monkeypatch)


def _check_documents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they measurements, these files would become tables and figures."""
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            save(folder, path.stem, content | {"quick": False})
    images = folder / "images"
    assert plots.draw_all(folder, images) == ["training", "scaling", "tasks", "curves"]
    assert "<svg" in (images / "bench-training.svg").read_text()
    before = (images / "bench-curves.svg").read_bytes()
    plots.draw_all(folder, images)
    assert (images / "bench-curves.svg").read_bytes() == before
    monkeypatch.setattr(tables, "BENCH", folder)
    monkeypatch.setattr(tables, "IMAGES", images)
    assert "| minilm |" in tables.training() and "images/bench-training.svg" in tables.training()
    assert "(best)" in tables.scaling()
    assert "without dropout" in tables.curves()
    assert "aten::" in tables.profile()
    assert "three models" in tables.heads()
    assert "| 2 |" in tables.tasks()
    (cpu,) = [entry for entry in summary.summarise(folder) if entry["ours"] is not None]
    assert cpu["figure"].startswith("CPU training") and cpu["ratio"] == cpu["ours"] / cpu["peer"]
    assert cpu["figure"] in tables.goals()


def test_the_pair_trainer_is_compared_or_said_to_be_missing(settings: Settings) -> None:
    found = pairs.measure(settings)
    if importlib.util.find_spec("accelerate") is None:
        assert found["not_measured"] == "accelerate is not installed"
        assert json.loads((settings.out / "pairs-cpu.json").read_text())["not_measured"]
    else:
        assert found["models"]["minilm"]["ratio"]["median"] > 0


def test_a_part_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Settings) -> None:
        raise RuntimeError("out of luck")

    done: list[str] = []
    monkeypatch.setattr(gpu, "PARTS", {"a": ("train", broken), "d": ("heads", lambda s: done.append(s.command))})
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--device", "cpu", "--only", "a,d", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    said = capsys.readouterr()
    assert ended.value.code == 1 and "failed: a" in said.out and "out of luck" in said.err
    assert done == ["python -m bench.heads --device cpu"]


def test_the_device_is_busy_as_long_as_any_kernel_runs() -> None:
    assert profile.covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4


def test_smoothing_is_a_moving_mean() -> None:
    assert curves.smooth([1.0, 2.0, 3.0, 4.0], window=2) == [1.5, 2.5, 3.5]


def test_the_goals_are_read_from_the_files_and_never_invented(tmp_path: Path) -> None:
    assert all(entry["ours"] is None and entry["reached"] is None for entry in summary.summarise(tmp_path))
    place = {"environment": {"device_name": "a card"}, "command": "python -m bench.train --device cuda"}

    def row(ours: float, peer: float, use: float) -> dict[str, Any]:
        return {
            who: {"examples_per_second": {"median": rate}, "flops_utilisation": {"median": share}}
            for who, rate, share in (("ours", ours, use), ("peer", peer, use / 4))
        }

    save(tmp_path, "train-cuda", {"models": {"minilm": row(99, 10, 0.2), "mpnet": row(60, 10, 0.31)}, **place})
    save(tmp_path, "scaling-cuda", {"models": {"mpnet": {"batches": {"64": row(1, 1, 0.3), "256": row(1, 1, 0.42)}}}})
    save(tmp_path, "pairs-cuda", {"not_measured": "accelerate is not installed"})
    found = {entry["figure"]: entry for entry in summary.write(tmp_path)}
    minilm, mpnet, against, *_ = found.values()
    assert (minilm["ratio"], minilm["reached"], minilm["device"]) == (9.9, False, "a card")
    assert (mpnet["ratio"], mpnet["reached"]) == (6.0, True)
    assert against["note"] == "accelerate is not installed"
    best, standard = list(found.values())[-2:]
    assert (best["ours"], best["reached"], standard["ours"], standard["reached"]) == (0.42, True, 0.31, True)
    assert json.loads((tmp_path / "summary.json").read_text()) == list(found.values())
    assert "9.90x" in summary.show(list(found.values()))


def test_the_score_tables_say_what_is_missing_and_compare_seed_by_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "RESULTS", tmp_path)
    assert scores.multitask() == scores.fast_plain() == scores.NOT_YET
    for folder, gain in (("multitask", 0.01), ("multitask-plain", 0.0)):
        for seed in (1, 2, 3):
            value = 0.7 + seed / 100 + gain
            dev = {task: {"metric": "accuracy", "metrics": {"accuracy": {"value": value}}} for task in scores.TASKS}
            run = {"seed": seed, "encoder": "minilm", "overall": {"2023": value}, "dev": dev, "seconds": 10.0}
            save(tmp_path / folder, f"seed{seed}", run | {"environment": {"device_name": "a card"}})
    assert "| mean of the three | 0.7300 | 0.7200 | 0.7400 |" in scores.multitask()
    assert "has seen Quora questions" in scores.multitask() and "bert-base-uncased" in scores.multitask()
    assert "| mean | 0.7300 | 0.7200 | +0.0100 | +0.0100, +0.0100 |" in scores.fast_plain()


def test_the_mistakes_shown_are_those_of_the_run_with_the_highest_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "RESULTS", tmp_path)
    assert scores.errors() == scores.NOT_YET
    for name, value, kept in (("1-first", 0.6, True), ("2-best", 0.7, True), ("3-forgotten", 0.9, False)):
        folder = tmp_path / "reproduction" / "minilm" / "paper" / name
        run = {"overall": {"2023": value}, "encoder": "minilm", "seed": 2, "steps": 1200}
        save(folder, "seed2", run | {"reproduction": {"row": f"paper/{name}"}})
        if kept:
            mistakes = {"task": "sst", "score": f"accuracy of {name}", "rows": 4}
            (folder / "mistakes-seed2.json").write_text(
                json.dumps([mistakes | {"classes": ["bad", "good"], "groups": [], "slices": []}])
            )
    assert scores.errors().startswith(
        "`recipes/paper/2-best.toml` with minilm, seed 2, 1,200 steps:\na plain mean of 0.700 on the course's dev sets.\n"
    )
    assert "accuracy of 2-best" in scores.errors()


def test_tables_about_quora_and_future_work_are_of_the_runs_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "RESULTS", tmp_path)
    assert lab.difference() == lab.NOT_YET
    folder = tmp_path / "reproduction" / "minilm" / "hillebrand"
    for seed, accuracy in ((1, 0.5), (2, 0.6)):
        metrics = {name: {"value": accuracy} for name in ("accuracy", "roc-auc")}
        run = {"dev": {"quora": {"metrics": metrics, "confusion": [[2, 4], [1, 3]]}}}
        save(folder / "3-cosine-similarity", f"seed{seed}", run)
        recipe = {"model": {"dropout": 0.1}, "tasks": {"sts": {"dropout": 0.0} if seed == 2 else {}}}
        save(folder / "6-concatenation", f"seed{seed}", run | {"recipe": recipe, "overall": {"2024": accuracy}})
    row = "0.550 (0.500 to 0.600) | 0.550 (0.500 to 0.600) | 0.700 (0.700 to 0.700) | 2 |"
    assert f"| `hillebrand/3-cosine-similarity` | {row}" in lab.difference()
    assert "Of the labels 0.400 are yes." in lab.difference() and "5-multi-task" not in lab.difference()
    row = "| `hillebrand/6-concatenation` | minilm | 0 or 0.1 | 0.550 (0.500 to 0.600) | 2 |"
    assert lab.future_work().splitlines()[2:] == [row]


def test_explanations_of_mistakes_are_asked_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "RESULTS", tmp_path)
    monkeypatch.setattr(lab, "EXPLANATIONS", {("sst", "a negation"): 0})
    assert lab.explanations() == lab.NOT_YET
    folder = tmp_path / "reproduction" / "mpnet" / "hillebrand" / "6-concatenation"
    for seed, share in ((1, 0.5), (2, 0.8)):
        save(folder, f"seed{seed}", {"seed": seed, "reproduction": {"row": "hillebrand/no-such-row"}})
        groups = [
            ("all", "", 40, 0.5),
            ("a negation", "no", 31, share),
            ("a negation", "yes", 9, 0.8),
            ("words", "", 40, 1),
        ]
        slices = [
            Slice(*names, rows, [Rate(value, value - 0.1, value + 0.1, rows, ".1%")]) for *names, rows, value in groups
        ]
        mistakes = TaskMistakes("sst", "", 40, ["news", "sport", "art"], [], slices)
        write_mistakes([mistakes], folder / f"mistakes-seed{seed}.json")
    assert lab.explanations().splitlines() == [
        "| task | texts | | rate | of rows | seed 1 | seed 2 |",
        "|---|---|---|---|---|---|---|",
        "| SST | a negation | no | wrong | 31 | 50.0% | **80.0%** |",
        "| SST | a negation | yes | wrong | 9 | too few to say | too few to say |",
        "",
        f"`hillebrand/6-concatenation` with mpnet. {BOLD}",
    ]


def test_every_block_of_a_page_is_known_and_can_be_written() -> None:
    pages = [ROOT / "README.md", ROOT / "recipes" / "README.md", *(ROOT / "docs").rglob("*.md")]
    used = {match[2] for page in pages for match in numbers.BLOCK.finditer(page.read_text())}
    assert used <= set(numbers.BLOCKS)
    for name, block in numbers.BLOCKS.items():
        text = block()
        assert text.endswith("\n") and "None" not in text, name


def test_a_folder_with_a_vocabulary_alone_gets_random_weights(
    tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = EncoderConfig(vocab_size=5000, width=16, layers=1, heads=2, feed_forward=16)
    monkeypatch.setitem(models.SHAPES, "minilm", shape)
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", *TOKENIZER):
        if (tiny_encoder / name).exists():
            shutil.copy(tiny_encoder / name, alone / name)
    model = find_model("minilm", tmp_path / "work", alone)
    assert (model.weights, model.shape.width) == ("random", 16)
    assert load_encoder(model.folder).config.width == 16


def _compare(model: Model, work: Path) -> dict[str, Any]:
    settings = Settings(CPU, work, work / "out", quick=True)
    matrix = matrix_rate(CPU, size=32, rounds=2)
    return train.compare(task_mix(model.folder, None), model, 4, Timing(1, 1, 1), settings, matrix)


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({"sst": {}, "quora": {}, "sts": {}}, ["quora", "sts"]),  # the pair as one input
        ({"sst": {}, "quora": {"head": "ph"}, "sts": {"head": "dph"}, "a": {"like": "sts"}}, ["quora", "sts"]),
        ({"sst": {}, "b": {"like": "sst"}, "sts": {}, "quora": {"head": "cosine"}}, ["sst", "b"]),
        ({"sst": {}, "b": {"like": "sst", "normalise": True}, "sts": {}}, ["sst"]),
    ],
)
def test_tasks_that_read_alike_are_those_that_one_encoding_serves(tasks: dict[str, Any], expected: list[str]) -> None:
    found = parse_recipe({"name": "a", "tasks": tasks, "model": {"encoder": "minilm"}}).tasks
    assert reading_alike({task.name: task for task in found}) == expected
