"""Every recipe in recipes/ trains, with a tiny encoder on tiny files, and does what it says: its heads, losses, sampler,
gradient rule and optimizer are those that ran, and a row of a paper differs from the row it was built on.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minbert.config import SAMPLE, Recipe
from minbert.data.plan import plan
from minbert.data.samplers import SAMPLERS, Sampler, Thinned
from minbert.experiment import new_model, train
from minbert.model.heads import BUILDERS, BothOrders, Vocabulary
from minbert.model.manifest import read_manifest
from minbert.recipes import as_dict, differences, parse_recipe, read_recipe
from minbert.reproduction.recipes import COMMON, EVERY_TASK, FINDINGS, MEAN, find_papers
from minbert.tasks import Task
from minbert.toml_tables import read_toml
from minbert.training import contrastive, losses
from minbert.training.gradients import CAGrad, GradVac, PCGrad, Surgery, add_gradients
from minbert.training.optimizers import AdamW, RAdam
from minbert.training.step import TrainStep
from minbert.training.trainer import Trainer
from tests.runs import Listener, Stopped

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "recipes"
PATHS = {
    str(path.relative_to(FOLDER))[: -len(".toml")]: path
    for path in sorted(FOLDER.rglob("*.toml"))
    if path.name != FINDINGS and not path.name.startswith(COMMON)
}

# Rows whose first steps are those of the row before; what differs instead.
SAME_STEPS = {
    "gulluk/7-em": "ensemble.runs",
    "hillebrand/7-more-epochs": "training.epochs",
    "vinjapuri-vasireddy/5-radam": "optimizer.kind",
    "vinjapuri-vasireddy/7-six-epochs": "training.epochs",
    "vinjapuri-vasireddy/8-weighted-mean": "training.best",
}
STEPS = 7  # of a run and of each of its stages: all their tasks are met
RULES = {"pcgrad": PCGrad, "gradvac": GradVac, "cagrad": CAGrad}
OPTIMIZERS = {"adamw": AdamW, "radam": RAdam}
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "cross-entropy": losses.cross_entropy,
    "bce": losses.binary_cross_entropy,
    "bce-threshold": losses.thresholded_bce,
    "mse": losses.mean_squared_error,
    "sigmoid-mse": losses.sigmoid_mse,
    "masked-lm": losses.masked_cross_entropy,
    "simcse": contrastive.ranking,
    "mnr": contrastive.ranking,
    "info-nce": contrastive.info_nce,
    "info-nce-printed": contrastive.info_nce,
}


@pytest.fixture(scope="module")
def course_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's rows under the names and in the form of the real files: 70 to train on, 16 for dev."""
    folder = tmp_path_factory.mktemp("data")
    stems = {"sentiment": ("ids-sst", "ids-cfimdb"), "paraphrase": ("quora",), "similarity": ("sts",)}
    for kind, names in stems.items():
        for split, count in {"train": 70, "dev": 16}.items():
            lines = (SAMPLE / f"{kind}-{split}.tsv").read_text(encoding="utf-8").splitlines()[: count + 1]
            rows = [line.split("\t") for line in lines]
            for name in names:
                if name == "ids-cfimdb":  # two classes
                    rows = [rows[0], *([*row[:-1], str(int(int(row[-1]) > 2))] for row in rows[1:])]
                _write(folder / "cs224n" / f"{name}-{split}.csv", rows)
    pairs = [line.split("\t") for line in (SAMPLE / "similarity-train.tsv").read_text(encoding="utf-8").splitlines()]
    triplets = [[one[1], one[2], other[2]] for one, other in pairwise(pairs[1:72])]
    _write(folder / "nli" / "nli-triplets.tsv", [["premise", "entailment", "contradiction"], *triplets])
    return folder


def _write(path: Path, rows: list[list[str]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t").writerows(rows)


def tiny(recipe: Recipe, encoder: Path, **training: Any) -> Recipe:
    """The same recipe with a tiny encoder, for one short epoch."""
    settings = {"epochs": 1, "evaluate_every": 0, "checkpoint_every": 0, "train_sample": 8, **training}
    if recipe.ensemble.models:
        settings["evaluate_every"] = 1  # several models to choose from
    changed: dict[str, Any] = {"model": replace(recipe.model, encoder=str(encoder))}
    short = {key: value for key, value in settings.items() if key != "train_sample"} | {"max_steps": STEPS}
    changed["stages"] = tuple(replace(stage, training=replace(stage.training, **short)) for stage in recipe.stages)
    return replace(recipe, training=replace(recipe.training, **settings), **changed)


Call = tuple[Callable[..., Tensor], dict[str, Any]]
"""A function and the settings it was called with."""
Seen = dict[Trainer, dict[str, list[Call]]]
"""The trainers of a run, and for each of their tasks the calls that its losses came from."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found: Seen = {}
    values: list[tuple[Call, Tensor]] = []
    make = Trainer.__init__

    def watched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(*inputs: Tensor, **settings: Any) -> Tensor:
            value = function(*inputs, **settings)
            plain = {name: one.tolist() if isinstance(one, Tensor) else one for name, one in settings.items()}
            values.append(((function, plain), value))
            return value

        return compute

    def watched_loss(loss: Callable[..., Tensor], calls: list[Call]) -> Callable[..., Tensor]:
        def compute(*inputs: Tensor) -> Tensor:
            values.clear()
            result = loss(*inputs)
            call, value = values[-1]  # the outermost, where one calls another
            assert value is result
            calls.append(call)
            return result

        return compute

    def watched_trainer(self: Trainer, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        found[self] = {task: [] for task in self.losses}
        for task, calls in found[self].items():
            self.losses[task] = watched_loss(self.losses[task], calls)

    monkeypatch.setattr(Trainer, "__init__", watched_trainer)
    for function in set(FUNCTIONS.values()):
        monkeypatch.setattr(f"{function.__module__}.{function.__name__}", watched(function))
    return found


@pytest.mark.parametrize("key", PATHS)
def test_a_recipe_trains_and_does_what_it_says(
    key: str, tmp_path: Path, tiny_encoder: Path, course_data: Path, seen: Seen
) -> None:
    recipe = tiny(read_recipe(PATHS[key]), tiny_encoder, max_steps=STEPS)
    data = None if recipe.data else course_data
    run = train(recipe, out=tmp_path / "run", data=data, device="cpu")
    assert set(run.results["dev"]) == {task.name for task in recipe.tasks}
    assert list(run.results.get("stages", {})) == [stage.name for stage in recipe.stages]
    assert all(stage["steps"] > 0 for stage in run.results.get("stages", {}).values())
    assert {trainer.recipe.name for trainer in seen} >= {recipe.name}
    assert len(seen) == recipe.ensemble.runs * (len(recipe.stages) + 1)
    assert {trainer.recipe.seed for trainer in seen} == {recipe.seed + 1000 * n for n in range(recipe.ensemble.runs)}
    assert len(read_manifest(run.model).members) == recipe.ensemble.models
    for trainer, calls in seen.items():
        assert trainer.step == trainer.plan.steps <= STEPS
        check_what_ran(trainer, calls, alone=len(seen) == 1)


def check_what_ran(trainer: Trainer, calls: dict[str, list[Call]], *, alone: bool) -> None:
    recipe, model = trainer.recipe, trainer.model
    trained = {task.name for task in recipe.tasks if task.trained}
    sampler = trainer.sampler.whole if isinstance(trainer.sampler, Thinned) else trainer.sampler
    assert type(sampler) is SAMPLERS[recipe.sampler.kind]
    shares = {task.name: task.fraction for task in recipe.tasks if task.trained}
    assert [(name, stream.fraction) for name, stream in sampler.streams.items()] == [*shares.items()]
    if recipe.sampler.kind == "weighted":
        check_shares(sampler, {name: recipe.sampler.weights.get(name, 1.0) for name in trained})
    assert type(trainer.optimizer) is OPTIMIZERS[recipe.optimizer.kind]
    if recipe.training.gradients == "sum":
        assert trainer.work.rule is add_gradients
    else:
        assert type(trainer.work.rule) is RULES[recipe.training.gradients]
    assert {name for name, task in trainer.plan.tasks.items() if task.batches} == trained
    assert {name for name, found in calls.items() if found} == trained
    for name in trained:
        assert all(call == named_loss(recipe.task(name)) for call in calls[name])
    assert (model.common is not None) == recipe.model.common_layer
    fresh = new_model(recipe, torch.device("cpu"))[1]
    for task in recipe.tasks:
        head = model.heads[task.name]
        check_head(head, task)
        how = "tokens" if task.is_masked else task.pooling or recipe.model.pooling
        assert model.poolings[task.name] == how
        drops = {module.p for module in head.modules() if isinstance(module, torch.nn.Dropout)}
        own = recipe.model.dropout if task.dropout is None else task.dropout
        if task.name in model.common_tasks and not isinstance(head, BothOrders):  # the dropout is before that layer
            assert drops <= {0.0} and model.dropouts.get_submodule(task.name).p == own
        else:
            assert drops <= {own} and task.name not in model.dropouts
        if any(True for _ in head.parameters()) and recipe.optimizer.lr:
            assert changed(head, fresh.heads[task.name]) == task.trained
    if alone:
        assert changed(model.encoder, fresh.encoder) == (recipe.training.mode == "finetune")


def check_shares(sampler: Sampler, weights: dict[str, float]) -> None:
    """In a long run each task comes as often as its weight says."""
    long = replace(sampler, config=replace(sampler.config, steps_per_epoch=1000))
    shares = {name: task.share for name, task in plan(long).tasks.items()}
    assert shares == pytest.approx({name: weight / sum(weights.values()) for name, weight in weights.items()}, abs=0.05)


def named_loss(task: Task) -> Call:
    """What the name of a task's loss stands for."""
    weights = torch.tensor(task.class_weights).tolist() or None
    classes = {"smoothing": task.label_smoothing, "class_weights": weights}
    heat = {"temperature": task.temperature}
    settings: dict[str, dict[str, Any]] = {
        "cross-entropy": classes,
        "bce": classes,
        "bce-threshold": {"threshold": task.threshold},
        "sigmoid-mse": {"low": task.low, "high": task.high},
        "simcse": heat,
        "mnr": heat,
        "info-nce": heat,
        "info-nce-printed": heat | {"positive_below": False},
    }
    return FUNCTIONS[task.loss], settings.get(task.loss, {})


def check_head(head: torch.nn.Module, task: Task) -> None:
    """Of the class that its name stands for; those of both orders by their branches."""
    kind = Vocabulary if task.is_masked else BUILDERS[task.head]
    if not isinstance(head, BothOrders):
        assert type(head) is kind
        return
    assert (len(head.branches), head.activation) == {"ph": (2, False), "dph": (3, False), "dpha": (3, True)}[task.head]


def changed(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return any(not torch.equal(mine, its) for mine, its in pairs)


# --- a row and the row before ---------------------------------------------------------------------------------------

Steps = dict[str, dict[str, torch.Tensor]]
"""For each task its first step: the loss, and the gradient of every parameter."""


@pytest.fixture(scope="module")
def first_steps(
    tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path, course_data: Path
) -> Callable[[str], Steps]:
    """`first_steps("hillebrand/2-multi-dataset")`, with weights that stay as they were made; computed once."""
    known: dict[str, Steps] = {}

    def find(key: str) -> Steps:
        if key not in known:
            known[key] = {}
            recipe, folder = tiny(read_recipe(PATHS[key]), tiny_encoder), tmp_path_factory.mktemp("first") / "run"
            with pytest.raises(Stopped):
                run_still(recipe, folder, course_data, lambda work: record_step(work, known[key]))
        return known[key]

    return find


def run_still(recipe: Recipe, folder: Path, data: Path, record: Callable[[TrainStep], None]) -> None:
    """With `record` in the place of the updates, but in the stages, which train the encoder that they hand on."""
    listener, update = Listener(part=recipe.name if recipe.stages else ""), TrainStep.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "update", lambda work: (record if listener.here() else update)(work))
        train(recipe, out=folder, data=data, device="cpu", watcher=listener)


def record_step(work: TrainStep, steps: Steps) -> None:
    """In the place of an update: what came of the tasks met for the first time, until all have been met."""
    for task, place in work.places.items():
        if work.totals[place, 1] and task not in steps:
            gradients = {
                name: value.grad.clone() for name, value in work.model.named_parameters() if value.grad is not None
            }
            steps[task] = {"loss": work.totals[place].clone(), **gradients}
    work.totals.zero_()
    work.optimizer.zero_grad(set_to_none=True)
    if len(steps) == sum(task.trained for task in work.model.tasks.values()):
        raise Stopped


def same(one: Steps, other: Steps) -> bool:
    if one.keys() != other.keys() or any(one[task].keys() != other[task].keys() for task in one):
        return False
    return all(torch.equal(value, other[task][name]) for task, found in one.items() for name, value in found.items())


BUILT_ON = {key: after for key, path in PATHS.items() if (after := read_toml(path).get("paper", {}).get("after"))}


@pytest.mark.parametrize("key", BUILT_ON)
def test_a_row_differs_from_the_row_it_was_built_on(key: str, first_steps: Callable[[str], Steps]) -> None:
    mine, before = (read_recipe(PATHS[name]) for name in (key, BUILT_ON[key]))
    lines = differences(replace(mine, name=before.name, about=before.about), before)
    assert lines
    if key in SAME_STEPS:
        assert any(line.startswith(f"{SAME_STEPS[key]}: ") for line in lines)
    assert same(first_steps(key), first_steps(BUILT_ON[key])) == (key in SAME_STEPS)


def test_gradients_of_a_row_are_the_same_each_time(first_steps: Callable[[str], Steps]) -> None:
    """Otherwise that two rows differ would mean nothing."""
    assert same(first_steps("hillebrand/7-more-epochs"), first_steps("hillebrand/6-concatenation"))


def test_only_the_named_tasks_go_through_the_common_layer(first_steps: Callable[[str], Steps]) -> None:
    """Or all, where none is named: only then has the layer a gradient."""
    recipes = {key: read_recipe(path) for key, path in PATHS.items()}
    keys = [key for key, recipe in recipes.items() if recipe.model.common_layer]
    assert "beyond/shared-quora-sts-layer" in keys
    for key in keys:
        steps = first_steps(key)
        reached = {task for task, found in steps.items() if "common.0.weight" in found}
        assert reached == set(recipes[key].model.common_tasks or steps), key


@pytest.mark.parametrize("key", [key for key, path in PATHS.items() if read_recipe(path).training.gradients != "sum"])
def test_a_gradient_rule_is_not_the_sum_where_tasks_conflict(
    key: str, tmp_path: Path, tiny_encoder: Path, course_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(read_recipe(PATHS[key]), tiny_encoder, max_steps=STEPS)
    model = replace(recipe.model, dropout=0.0, encoder_dropout=0.0, common_dropout=0.0)  # tasks apart draw others
    rule = RULES[recipe.training.gradients]
    weigh, conflicts = rule.weigh, []

    def watched(self: Surgery, gram: Any, *others: Any) -> Any:
        conflicts.append(bool((gram < 0).any()))
        return weigh(self, gram, *others)

    def run(name: str, gradients: str) -> list[Tensor]:
        found: list[Tensor] = []
        changed = replace(recipe, model=model, training=replace(recipe.training, gradients=gradients))
        run_still(changed, tmp_path / name, course_data, lambda work: found.append(take_gradient(work)))
        return found

    def differs(one: Tensor, other: Tensor) -> bool:
        return bool((one - other).norm() > 1e-5 * other.norm())

    plain = run("plain", "sum")
    monkeypatch.setattr(rule, "weigh", watched)
    ruled = run("ruled", recipe.training.gradients)
    monkeypatch.setattr(rule, "weigh", lambda _self, gram, *_: np.ones(len(gram)))
    alike = run("alike", recipe.training.gradients)
    assert any(conflicts)
    assert all(map(differs, compress(ruled, conflicts), compress(plain, conflicts)))
    assert not any(map(differs, alike, plain))  # otherwise that they differ would mean nothing


def take_gradient(work: TrainStep) -> Tensor:
    """The encoder's, all in one, which is then cleared."""
    found = [value.grad.flatten() for value in work.model.encoder.parameters() if value.grad is not None]
    work.optimizer.zero_grad(set_to_none=True)
    return torch.cat(found)


# --- what stands in the files ---------------------------------------------------------------------------------------


def test_a_recipe_is_the_same_after_being_written_and_read() -> None:
    for key, path in PATHS.items():
        recipe = read_recipe(path)
        assert parse_recipe(as_dict(recipe)) == recipe, key


def test_every_row_says_what_it_is_and_what_it_was_built_on() -> None:
    for paper in find_papers(FOLDER).values():
        for row in paper.rows.values():
            assert row.reported.row, row.key
            assert row.reported.after == "" or row.reported.after in PATHS, row.key
            assert row.reported.after != row.key


FIRST = {
    *("gulluk/1-sst-only", "gulluk/cfimdb-frozen", "gulluk/sst-frozen", "hillebrand/1-baseline"),
    *("mohammed-sabane/01-vm-frozen", "mohammed-sabane/6.1-quora-pooler", "mohammed-sabane/6.1-sst-pooler"),
    *("mohammed-sabane/6.1-sts-pooler", "vinjapuri-vasireddy/1-milestone"),
}


def test_only_first_rows_were_built_on_nothing() -> None:
    """Others are compared with the row before."""
    rows = {row.key for paper in find_papers(FOLDER).values() for row in paper.rows.values()}
    assert rows - BUILT_ON.keys() == FIRST


def test_a_paper_has_as_many_rows_as_its_table() -> None:
    papers = find_papers(FOLDER)
    rows = {name: [row for row in paper.rows if not re.match(r"\d\.\d", row)] for name, paper in papers.items()}
    counts = {"mohammed-sabane": 15, "gulluk": 11, "vinjapuri-vasireddy": 8, "hillebrand": 7}
    assert {name: len(rows[name]) for name in counts} == counts
    assert list(papers)[-1] == "beyond"


def test_findings_are_about_tasks_that_both_rows_have() -> None:
    papers = find_papers(FOLDER)
    assert sum(len(paper.claims.findings) for paper in papers.values()) >= 25
    for paper in papers.values():
        for finding in paper.claims.findings:
            assert finding.better != finding.worse
            pair = [f"{paper.name}/{name}" for name in (finding.better, finding.worse)]
            if finding.on in (MEAN, EVERY_TASK):
                continue
            for key in pair:
                assert finding.on in {task.name for task in read_recipe(PATHS[key]).tasks}, finding.claim


def test_every_recipe_is_in_the_index() -> None:
    index = (FOLDER / "README.md").read_text()
    assert [key for key in PATHS if f"({key}.toml)" not in index] == []


# --- the numbers, against the papers' own tables --------------------------------------------------------------------


@pytest.fixture(scope="module")
def papers_text() -> str:
    path = Path(os.environ.get("SHARED", "../shared")) / "papers" / "README.md"
    if not path.exists():
        pytest.skip(f"no papers at {path}: set SHARED to the folder that holds papers/README.md")
    return path.read_text(encoding="utf-8")


def tables(text: str) -> Iterator[list[dict[str, str]]]:
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip(" *") for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        yield [dict(zip(head, row, strict=True)) for row in rows]


def reported(paper: str, prefix: str) -> Any:
    (row,) = [row for row in find_papers(FOLDER)[paper].rows.values() if row.name.startswith(prefix)]
    return row.reported


def test_the_numbers_are_those_of_the_papers(papers_text: str) -> None:
    experiments, gulluk, hillebrand = tables(papers_text)
    for line in experiments:
        found = reported("mohammed-sabane", f"{int(line['exp']):02d}-")
        printed = {name: float(line[column]) for name, column in TASK_COLUMNS.items()}
        assert found.dev == printed, line["exp"]
        assert found.overall["dev"] == float(line["mean"])
    for number, line in enumerate(gulluk, start=1):
        found = reported("gulluk", f"{number}-")
        assert found.row == line["row"]
        assert found.dev == {name: float(line[column]) for name, column in COLUMNS.items()}
    for number, line in enumerate(hillebrand, start=1):
        found = reported("hillebrand", f"{number}-")
        assert found.dev == {name: float(line[column]) for name, column in COLUMNS.items()}
        assert found.overall["dev"] == float(line["overall"])
        assert found.rule == "2024"
    words = r"SST (\S+) frozen, (\S+) full; CFIMDB (\S+) frozen, (\S+) full"
    names = ("sst-frozen", "sst-full", "cfimdb-frozen", "cfimdb-full")
    for name, value in zip(names, re.search(words, papers_text).groups(), strict=True):  # type: ignore[union-attr]
        assert reported("gulluk", name).dev == {name.partition("-")[0]: float(value.rstrip("."))}
    assert list(reported("gulluk", "7-").test.values()) == [0.509, 0.788, 0.62]
    assert "Test (EM): .509 / .788 / .620, overall .639" in papers_text
    assert reported("gulluk", "7-").overall == {"test": 0.639}
    assert "Test: .749 overall; .532 / .789 / .854" in papers_text
    assert list(reported("hillebrand", "6-").test.values()) == [0.532, 0.789, 0.854]
    assert reported("hillebrand", "6-").overall["test"] == 0.749
    assert "**.655** overall (test)" in papers_text
    vinjapuri = [row.reported for row in find_papers(FOLDER)["vinjapuri-vasireddy"].rows.values()]
    assert [(one.dev, one.overall) for one in vinjapuri] == [
        ({}, {"test": 0.655} if one.overall else {}) for one in vinjapuri
    ]
    assert reported("vinjapuri-vasireddy", "7-").overall == {"test": 0.655}


COLUMNS = {"sst": "SST", "quora": "Quora", "sts": "STS"}
TASK_COLUMNS = {"sst": "SST dev", "sts": "STS dev", "quora": "QQP dev"}
ORDER = {"SST": "sst", "STS": "sts", "QQP": "quora"}


def test_the_settings_are_those_of_the_table(papers_text: str) -> None:
    experiments = next(tables(papers_text))
    for line in experiments:
        (key,) = [key for key in PATHS if key.startswith(f"mohammed-sabane/{int(line['exp']):02d}-")]
        recipe = read_recipe(PATHS[key])
        assert recipe.training.epochs == int(line["epochs"].split(",")[-1]), key
        assert (recipe.training.batch_size, recipe.model.dropout) == (int(line["batch"]), float(line["dropout"])), key
        assert recipe.optimizer.lr == 1e-5
        if "," in line["order"]:
            assert recipe.sampler.order == tuple(ORDER[name] for name in line["order"].split(",")), key
        assert (recipe.sampler.weights == {"quora": 2.0}) == (line["order"] == "2x QQP"), key
        assert recipe.model.common_layer == ("CL" in line["method"])
        heads = {name: recipe.task(name).head for name in ("quora", "sts")}
        wanted = re.search(r"(?:DPHA|DPH|PH|VM)", line["method"])[0].lower().replace("vm", "concat")  # type: ignore[index]
        assert heads == {"quora": wanted, "sts": "ph" if "(PD)" in line["method"] else wanted}, key


def test_the_papers_overall_scores_follow_their_rule() -> None:
    """Recomputed from the printed scores, to the rounding of three figures."""
    for paper in find_papers(FOLDER).values():
        for row in paper.rows.values():
            told = row.reported
            for split, scores in {"dev": told.dev, "test": told.test}.items():
                if len(scores) < 3 or split not in told.overall:
                    continue
                parts = [(s + 1) / 2 if name == "sts" and told.rule == "2024" else s for name, s in scores.items()]
                assert sum(parts) / 3 == pytest.approx(told.overall[split], abs=0.0016), (row.key, split)
