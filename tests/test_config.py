"""Recipes: what TOML says, what --set changes, what comes back out, and every nonsense that is refused when it is read."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minbert.config import (
    SAMPLE,
    ModelConfig,
    OptimizerConfig,
    PaperConfig,
    Recipe,
    SamplerConfig,
    TrainingConfig,
    data_folder,
)
from minbert.errors import MinbertError
from minbert.recipes import as_dict, differences, parse_recipe, read_recipe, to_toml
from minbert.task_checks import check_task
from minbert.tasks import BUILT_IN, HEADS, LOSSES, Task

MULTITASK = """
about = "three tasks"
seed = 7

[tasks.sst]
[tasks.quora]
head = "interaction"
[tasks.sts]
head = "cosine"
loss = "cosine-mse"

[model]
pooling = "mean"

[sampler]
kind = "weighted"
weights = { quora = 2, sst = 0.5 }

[optimizer]
lr = 1e-5
betas = [0.9, 0.98]
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "multitask.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def parse(text: str) -> Recipe:
    return parse_recipe(tomllib.loads(text))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(MinbertError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_recipe_holds_what_differs_and_the_rest_is_default(write: Write) -> None:
    recipe = read_recipe(write(MULTITASK))
    assert (recipe.name, recipe.about, recipe.seed) == ("multitask", "three tasks", 7)
    assert recipe.model == ModelConfig(pooling="mean")
    assert recipe.sampler == SamplerConfig(kind="weighted", weights={"quora": 2.0, "sst": 0.5})
    assert recipe.optimizer == OptimizerConfig(lr=1e-5, betas=(0.9, 0.98))
    assert recipe.training == TrainingConfig()
    assert [task.name for task in recipe.tasks] == ["sst", "quora", "sts"]
    assert recipe.task("sts").loss == "cosine-mse"
    assert read_recipe(str(write('name = "other"\n' + MULTITASK)), seed=3).name == "other"
    assert read_recipe(write(MULTITASK), seed=3).seed == 3
    message = refusal(lambda: recipe.task("sms"))
    assert message == 'no task "sms" (did you mean "sts"?); this recipe has: sst, quora, sts'


def test_a_file_that_is_no_recipe(write: Write, tmp_path: Path) -> None:
    assert refusal(lambda: read_recipe(tmp_path / "none.toml")) == f"{tmp_path}/none.toml: no such recipe"
    path = write("tasks = [")
    assert refusal(lambda: read_recipe(path)).startswith(f"{path}: not a TOML file (")
    path.write_bytes(b'about = "\xff"')
    assert refusal(lambda: read_recipe(path)).startswith(f"{path}: not a TOML file (")
    path.write_text("seed = " + "1" * 5000)
    assert refusal(lambda: read_recipe(path)).startswith(f"{path}: not a TOML file (")
    assert refusal(lambda: read_recipe(tmp_path)).startswith(f"{tmp_path}: not a TOML file (")
    for text in ("", "[tasks]", "tasks = 3"):
        assert refusal(lambda: parse(text)) == "recipe: no tasks; expected a table such as [tasks.sst]"  # noqa: B023


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sead = 1", 'recipe: unknown key "sead" (did you mean "seed"?); known: about, data, ensemble, model, name, '),
        ("[modell]", 'recipe: unknown key "modell" (did you mean "model"?); known: '),
        ("[model]\npoolin = 1", 'recipe: model: unknown key "poolin" (did you mean "pooling"?); known: common_dropout'),
        ("[sampler]\nweight = 1", 'recipe: sampler: unknown key "weight" (did you mean "weights"?)'),
        ("[optimizer]\nlearning_rate = 1", 'recipe: optimizer: unknown key "learning_rate"'),
        ("[training]\nepoch = 1", 'recipe: training: unknown key "epoch" (did you mean "epochs"?)'),
        ("[tasks.sst.x]", 'recipe: [tasks.sst]: unknown key "x"; known: borrow, bounded, class_weights, '),
        ('[tasks.sts]\nheads = "cosine"', 'recipe: [tasks.sts]: unknown key "heads" (did you mean "head"?)'),
        ('[tasks.sts]\nname = "other"', 'recipe: [tasks.sts]: unknown key "name"'),
        (
            '[model]\npooling = "men"',
            'recipe: model: pooling is "men" (did you mean "mean"?); expected one of: cls, po',
        ),
        (
            '[sampler]\nkind = "powers"',
            'recipe: sampler: kind is "powers" (did you mean "power"?); expected one of: se',
        ),
        ("[sampler]\nkind = 3", 'recipe: sampler: kind is "3"; expected one of: sequential'),
        ('seed = "one"', "recipe: seed is 'one'; expected a whole number"),
        ("seed = 1.0", "recipe: seed is 1.0; expected a whole number"),
        ("seed = true", "recipe: seed is True; expected a whole number"),
        ("about = 2024-01-01", "recipe: about is datetime.date(2024, 1, 1); expected a text"),
        ("model = 3", "recipe: model is 3; expected a table"),
        (
            '[model]\ncommon_tasks = ["sst"]',
            "recipe: model.common_tasks without a common layer; expected model.common_l",
        ),
        ('[model]\ncommon_layer = true\ncommon_tasks = ["st"]', 'recipe: model.common_tasks names "st"'),
        ('[model]\ncommon_layer = "yes"', "recipe: model: common_layer is 'yes'; expected true or false"),
        ("[model]\ndropout = true", "recipe: model: dropout is True; expected a number"),
        ("[optimizer]\nlr = nan", "recipe: optimizer: lr is nan; expected a finite number"),
        ("[optimizer]\nlr = inf", "recipe: optimizer: lr is inf; expected a finite number"),
        (f"[optimizer]\nlr = {'9' * 400}", "recipe: optimizer: lr is inf; expected a finite number"),
        ("[optimizer]\nbetas = 0.9", "recipe: optimizer: betas has 1 values; expected 2"),
        ("[optimizer]\nbetas = [0.9, 'x']", "recipe: optimizer: betas is 'x'; expected a number"),
        ("[sampler]\nweights = 3", "recipe: sampler: weights is 3; expected a table"),
        ("[sampler.weights]\nsst = 'big'", "recipe: sampler: weights.sst is 'big'; expected a number"),
        ("[tasks]\nsts = 3", "recipe: tasks.sts is 3; expected a table, [tasks.sts]"),
        ("[tasks.sts]\nlow = 'a'", "recipe: [tasks.sts]: low is 'a'; expected a number"),
        ("[tasks.sts]\ntrain = [1]", "recipe: [tasks.sts]: train is 1; expected a text"),
        (
            "[sampler]\norder = ['sst', 'sst2']",
            'recipe: sampler.order names "sst2" (did you mean "sst"?); the tasks ar',
        ),
        ("[sampler.weights]\nquora = 1", 'recipe: sampler.weights names "quora"; the tasks are: sst'),
        (
            "[training]\nbest_task = 'sts'",
            'recipe: training.best_task names "sts" (did you mean "sst"?); the tasks are',
        ),
        ("[training.best_weights]\nq = 1", 'recipe: training.best_weights names "q"; the tasks are: sst'),
        ("[training]\nbest = 'task'", 'recipe: training.best is "task"; expected training.best_task to say which'),
        (
            "[tasks.sts]\n[sampler]\norder = ['sst']",
            "recipe: sampler.order leaves out sts; expected every task at leas",
        ),
        ("seed = -1", "recipe: seed is -1; expected 0 or more"),
        ("[training]\nepochs = 0", "recipe: training.epochs is 0; expected 1 or more"),
        ("[training]\nbatch_size = 0", "recipe: training.batch_size is 0; expected 1 or more"),
        ("[training]\nbatch_tokens = -1", "recipe: training.batch_tokens is -1; expected 0 or more"),
        ("[training]\nema = 1.0", "recipe: training.ema is 1.0; expected 0 to 0.999999"),
        ("[training]\npatience = -1", "recipe: training.patience is -1; expected 0 or more"),
        ("[training.best_weights]\nsst = -1", "recipe: training.best_weights.sst is -1.0; expected 0 or more"),
        ("[sampler.weights]\nsst = -1", "recipe: sampler.weights.sst is -1.0; expected 0 or more"),
        ("[sampler]\nsteps_per_epoch = -1", "recipe: sampler.steps_per_epoch is -1; expected 0 or more"),
        ("[optimizer]\nlr = -1", "recipe: optimizer.lr is -1.0; expected 0 to 10"),
        ("[optimizer]\nhead_lr = 11", "recipe: optimizer.head_lr is 11.0; expected 0 to 10"),
        ("[optimizer]\nbetas = [0.9, 1.0]", "recipe: optimizer.betas is 1.0; expected 0 to 0.999999"),
        (
            "[optimizer]\nrestart = true",
            'recipe: optimizer.restart with sampler.kind "proportional"; expected tasks that have their turns, "seq',
        ),
        (
            '[sampler]\nkind = "sequential"\n[optimizer]\nrestart = true\nwarmup = 0\nschedule = "constant"',
            "recipe: optimizer.restart with a rate that never changes; expected tasks",
        ),
        ("[tasks.sst]\nbounded = false", "recipe: [tasks.sst] bounded is false; a classification task has no scale"),
        (
            '[tasks.sts]\nbounded = false\nloss = "sigmoid-mse"',
            'recipe: [tasks.sts] bounded is false with loss "sigmoid-mse", whose score is within the scale by itself',
        ),
        (
            '[tasks.sts]\nbounded = false\nhead = "cosine"\nloss = "cosent"',
            'recipe: [tasks.sts] bounded is false with loss "cosent", whose score has no scale; expected it left out',
        ),
        ("[optimizer]\nwarmup = 2", "recipe: optimizer.warmup is 2.0; expected 0 to 1"),
        ("[optimizer]\nclip = -1", "recipe: optimizer.clip is -1.0; expected 0 or more"),
        ("[model]\ndropout = 1", "recipe: model.dropout is 1.0; expected 0 to 0.99"),
        ("[model]\nencoder_dropout = 1", "recipe: model.encoder_dropout is 1.0; expected 0 to 0.99"),
        ("[model]\nmax_tokens = 4", "recipe: model.max_tokens is 4; expected 5 or more"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str) -> None:
    table = tomllib.loads(text)
    if not isinstance(table.get("tasks"), dict) or "sst" not in table["tasks"]:
        table["tasks"] = {"sst": {}, **table.get("tasks", {})}
    assert refusal(lambda: parse_recipe(table)).startswith(message)


def test_a_base_holds_what_several_recipes_have_in_common(tmp_path: Path) -> None:
    (tmp_path / "far.toml").write_text(
        'name = "far"\nabout = "far"\nseed = 9\n[tasks.sts]\nhead = "cosine"\n[training]\nepochs = 5\n'
    )
    (tmp_path / "common.toml").write_text(
        'base = "far.toml"\n[paper]\nrow = "3"\ndev = { sst = 0.5 }\n[tasks.sst]\n[training]\nbatch_size = 8\n[sampler]\nkind = "weighted"\nweights = { sst = 2 }\n'
    )
    path = tmp_path / "row.toml"
    path.write_text('base = "common.toml"\n[tasks.sts]\nloss = "cosine-mse"\n[sampler.weights]\nsts = 3\n')
    recipe = read_recipe(path, sets=["training.epochs=7"])
    assert (recipe.name, recipe.about, recipe.seed) == ("row", "", 9)
    assert [(task.name, task.head, task.loss) for task in recipe.tasks] == [
        ("sts", "cosine", "cosine-mse"),
        ("sst", "linear", "cross-entropy"),
    ]
    assert recipe.training == TrainingConfig(epochs=7, batch_size=8)
    assert recipe.sampler.weights == {"sst": 2.0, "sts": 3.0}
    assert recipe.paper == PaperConfig()
    assert "base" not in as_dict(recipe)


def test_a_base_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text('base = "other.toml"\n[tasks.sst]\n')
    assert refusal(lambda: read_recipe(one)) == f"{other}: no such recipe"
    other.write_text('base = "one.toml"\n')
    assert refusal(lambda: read_recipe(one)) == f"{one}: is the base of its own base; expected an end"
    other.write_text("base = 3\n")
    assert refusal(lambda: read_recipe(other)).startswith(f"{other}: base is 3; expected a file beside it")
    assert 'unknown key "base"' in refusal(lambda: parse('base = "x.toml"\n[tasks.sst]'))


def test_what_a_paper_reports_comes_back_and_changes_no_run() -> None:
    text = """
    [tasks.sst]
    [paper]
    row = "14"
    after = "one/two"
    dev = { sst = 0.526, sts = -0.009 }
    overall = { dev = 0.762, test = 0.769 }
    rule = "2024"
    note = "a \\"misprint\\""
    """
    recipe = parse(text)
    assert recipe.paper.dev == {"sst": 0.526, "sts": -0.009}
    assert recipe.paper.test == {}
    assert parse(to_toml(recipe)) == recipe
    plain = parse("[tasks.sst]")
    assert plain.paper == PaperConfig()
    assert "paper" not in as_dict(plain)
    assert differences(recipe, plain) == []
    assert "paper.dev.sst is 52.6; expected -1 to 1" in refusal(lambda: parse("[tasks.sst]\n[paper.dev]\nsst = 52.6"))
    assert "paper: unknown key" in refusal(lambda: parse('[tasks.sst]\n[paper]\nrows = "14"'))


def test_a_task_that_is_not_trained_has_no_part_in_steps() -> None:
    text = "[tasks.sst]\n[tasks.sts]\ntrained = false\n[sampler]\n"
    recipe = parse(text + 'kind = "round-robin"\norder = ["sst"]')
    assert [task.name for task in recipe.trained] == ["sst"]
    for setting in ('order = ["sst", "sts"]', "weights = { sts = 2 }"):
        message = refusal(lambda: parse(text + setting))  # noqa: B023
        assert message.endswith('names "sts", which has trained = false; expected it left out')
    assert refusal(lambda: parse("[tasks.sts]\ntrained = false")).startswith("recipe: no task is trained: sts")
    alone = text + 'kind = "all"\n[training]\ngradients = "pcgrad"'
    assert 'training.gradients is "pcgrad", with one task, sst' in refusal(lambda: parse(alone))


# --- --set ----------------------------------------------------------------------------------------------------------


def test_settings_change_what_the_file_says(write: Write) -> None:
    sets = [
        "training.epochs=5",
        " optimizer.lr = 3e-5 ",
        "optimizer.betas=[0.8, 0.9]",
        "sampler.weights.sst=4",
        "sampler.weights.sts=1",
        "tasks.sst.head=mlp",
        "tasks.sts.dev=['a.csv', 'b.csv']",
        "model.common_layer=true",
        "model.encoder=sentence-transformers/all-MiniLM-L6-v2",
        "about=it's = fine",
        'data="2024"',
        "model.encoder_dropout=0.2",
    ]
    recipe = read_recipe(write(MULTITASK), sets=sets)
    assert recipe.training.epochs == 5
    assert recipe.optimizer == OptimizerConfig(lr=3e-5, betas=(0.8, 0.9))
    assert recipe.sampler.weights == {"quora": 2, "sst": 4, "sts": 1}
    assert recipe.task("sst").head == "mlp"
    assert recipe.task("sts").dev == ("a.csv", "b.csv")
    assert recipe.model == ModelConfig(
        "sentence-transformers/all-MiniLM-L6-v2", "mean", encoder_dropout=0.2, common_layer=True
    )
    assert (recipe.about, recipe.data) == ("it's = fine", "2024")
    assert read_recipe(write(MULTITASK), sets=["seed=1", "seed=2"]).seed == 2
    assert read_recipe(write(MULTITASK), sets=["seed=1"], seed=9).seed == 9
    assert read_recipe(write(MULTITASK), sets=["about="]).about == ""


def test_a_setting_may_add_a_task(write: Write) -> None:
    recipe = read_recipe(write(MULTITASK), sets=["tasks.cfimdb.weight=2", "tasks.mine.like=sst"])
    assert [task.name for task in recipe.tasks] == ["sst", "quora", "sts", "cfimdb", "mine"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epochs", '--set epochs: expected key=value, for example "training.epochs=3"'),
        ("=3", "--set =3: expected key=value"),
        ("training.epoch=3", 'training: unknown key "epoch" (did you mean "epochs"?)'),
        ("tasks.quorra.head=mlp", '[tasks.quorra] has no kind and is not built in (did you mean "quora"?)'),
        ("seed.x=3", "--set seed.x=3: seed is not a table"),
        ("training.epochs=three", "training: epochs is 'three'; expected a whole number"),
        ("training=3", "training is 3; expected a table"),
    ],
)
def test_a_setting_that_makes_no_sense_is_said(write: Write, setting: str, message: str) -> None:
    path = write(MULTITASK)
    assert message in refusal(lambda: read_recipe(path, sets=[setting]))


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_a_built_in_task_is_overridden_by_what_the_recipe_says() -> None:
    (task,) = parse("[tasks.sst]\nhead = 'mlp'\ndev = 'mine.csv'\nclasses = ['bad', 'good']").tasks
    usual = check_task(BUILT_IN["sst"])
    assert task == replace(usual, head="mlp", dev=("mine.csv",), classes=("bad", "good"))
    assert parse("[tasks.sst]").tasks == (usual,)


def test_like_borrows_a_built_in_task_under_another_name() -> None:
    first, second = parse("[tasks.sts]\n[tasks.near]\nlike = 'sts'\nhead = 'cosine'\nkind = 'pair-regression'").tasks
    assert second == replace(first, name="near", head="cosine")
    message = refusal(lambda: parse("[tasks.near]\nlike = 'quorra'"))
    assert message == 'recipe: [tasks.near] like is "quorra" (did you mean "quora"?); built in: sst, cfimdb, quora, sts'


def test_a_users_own_task() -> None:
    recipe = parse("""
        [tasks."spam or ham"]
        kind = "classification"
        train = ["a.csv", "b.jsonl"]
        dev = "dev.csv"
        text = "body"
        classes = ["ham", "spam"]
        class_weights = [1, 3]
        metric = "macro-f1"
    """)
    (task,) = recipe.tasks
    assert (task.name, task.train, task.dev) == ("spam or ham", ("a.csv", "b.jsonl"), ("dev.csv",))
    assert (task.loss, task.outputs, task.views) == ("cross-entropy", 2, ("first",))
    assert (task.metric_name, task.class_weights) == ("macro-f1", (1.0, 3.0))
    assert refusal(lambda: parse("[tasks.x]\nkind = 'regression'")) == (
        "recipe: [tasks.x] has no files; expected train and dev"
    )
    assert refusal(lambda: parse("[tasks.mood]")) == (
        "recipe: [tasks.mood] has no kind and is not built in; "
        "expected kind to be one of: classification, regression, pair-classification, pair-regression, contrastive, masked"
    )
    message = refusal(lambda: parse("[tasks.x]\nkind = 'pair'"))
    assert message.startswith('recipe: [tasks.x]: kind is "pair"')


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("sst", {}, {"loss": "cross-entropy", "outputs": 5, "views": ("first",), "metric_name": "accuracy"}),
        ("cfimdb", {"loss": "bce"}, {"outputs": 1}),
        ("quora", {}, {"loss": "bce", "outputs": 1, "views": ("joint",)}),
        ("quora", {"loss": "cross-entropy"}, {"outputs": 2}),
        ("quora", {"head": "cosine"}, {"loss": "bce", "scale": 5.0, "views": ("first", "second")}),
        ("quora", {"classes": ("a", "b", "c")}, {"loss": "cross-entropy", "outputs": 3}),
        ("sts", {}, {"loss": "mse", "scale": 5.0, "threshold": 2.5, "metric_name": "pearson"}),
        ("sts", {"head": "dpha", "loss": "cosent"}, {"views": ("joint", "reversed"), "outputs": 1}),
        ("sts", {"low": -1.0, "high": 1.0, "head": "cosine"}, {"scale": 1.0, "threshold": 0.0}),
    ],
)
def test_defaults_that_follow_from_the_task(name: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    task = check_task(replace(BUILT_IN[name], **changes))
    assert {key: getattr(task, key) for key in expected} == expected
    assert check_task(task) == task


ONE_NUMBER = ("cosine", "projected-dot", "projected-cosine", "cosine-1d")
SINGLE = ("linear", "mlp")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("quora", {"text2": ""}, "[tasks.quora] text2 is empty; a pair-classification task reads two columns"),
        ("sst", {"text2": "b"}, '[tasks.sst] text2 is "b"; a classification task reads one column'),
        ("sst", {"classes": ()}, "[tasks.sst] classes has 0 names; expected two or more"),
        ("sst", {"classes": ("a",)}, "[tasks.sst] classes has 1 names; expected two or more"),
        ("sst", {"classes": ("a", "b", "a")}, "[tasks.sst] classes names one twice: a, b, a"),
        ("sts", {"classes": ("a", "b")}, "[tasks.sts] classes has 2 names; a pair-regression task has none"),
        ("sts", {"low": 5.0}, "[tasks.sts] the scale runs from 5.0 to 5.0; expected low below high"),
        ("sst", {"fraction": 0.0}, "[tasks.sst] fraction is 0.0; expected more than 0 and at most 100"),
        ("sst", {"fraction": 101.0}, "[tasks.sst] fraction is 101.0; expected more than 0 and at most 100"),
        ("sst", {"weight": -1.0}, "[tasks.sst] weight is -1.0; expected 0 or more"),
        ("sst", {"hidden": -1}, "[tasks.sst] hidden is -1; expected 0 or more"),
        ("sst", {"dropout": 1.0}, "[tasks.sst] dropout is 1.0; expected 0 to less than 1"),
        ("sst", {"label_smoothing": 1.0}, "[tasks.sst] label_smoothing is 1.0; expected 0 to less than 1"),
        ("sts", {"label_smoothing": 0.1}, "[tasks.sts] label_smoothing is 0.1; a pair-regression task has no classes"),
        ("sts", {"scale": -5.0, "loss": "cosent"}, "[tasks.sts] scale is -5.0; expected more than 0"),
        ("sts", {"low": -5.0, "high": 0.0, "head": "cosine"}, "[tasks.sts] scale is 0.0; expected more than 0"),
        (
            "sts",
            {"threshold": 7.0, "loss": "bce-threshold"},
            "[tasks.sts] threshold is 7.0; expected it between 0.0 and 5.0",
        ),
        ("sst", {"head": "liner"}, '[tasks.sst] head is "liner" (did you mean "linear"?); expected one of: linear, '),
        ("sst", {"loss": "crossentropy"}, '[tasks.sst] loss is "crossentropy" (did you mean "cross-entropy"?)'),
        ("sst", {"metric": "f1"}, '[tasks.sst] metric is "f1"'),
        ("sst", {"metric": "pearson"}, '[tasks.sst] metric is "pearson"; expected one of: accuracy, macro-f1, '),
        ("sts", {"metric": "accuracy"}, '[tasks.sts] metric is "accuracy"; expected one of: pearson, spearman'),
        ("sst", {"loss": "bce"}, '[tasks.sst] loss is "bce" with 5 classes; expected 2, or "cross-entropy"'),
        (
            "sst",
            {"loss": "mse"},
            '[tasks.sst] loss is "mse", which is not for classification; expected cross-entropy, bce',
        ),
        (
            "sts",
            {"loss": "bce"},
            '[tasks.sts] loss is "bce", which is not for pair-regression; expected mse, sigmoid-mse, cosine-',
        ),
        ("quora", {"loss": "cosent"}, '[tasks.quora] loss is "cosent", which is not for pair-classification'),
        ("sst", {"class_weights": (1.0,)}, "[tasks.sst] class_weights has 1 numbers; expected 5"),
        ("sts", {"class_weights": (1.0,)}, "[tasks.sts] class_weights has 1 numbers; expected 0"),
        ("quora", {"class_weights": (1.0, -1.0)}, "[tasks.quora] class_weights holds -1.0; expected 0 or more"),
        (
            "quora",
            {"head": "projected-cosine"},
            '[tasks.quora] head "projected-cosine" is never below 0, so its probability never below one half',
        ),
        *(
            (
                "sst",
                {"head": head},
                f'[tasks.sst] head is "{head}", which reads two texts; a classification task has one',
            )
            for head in ("concat", "difference", "absolute-difference", "interaction", "ph", "dph", "dpha")
        ),
        *(
            (
                "quora",
                {"head": head, "loss": "cross-entropy", "classes": ("a", "b", "c")},
                f'[tasks.quora] head "{head}" gives one number; cross-entropy needs 3',
            )
            for head in ONE_NUMBER
        ),
        *(
            (
                "sts",
                {"head": head, "loss": "cosine-mse"},
                f'[tasks.sts] loss "cosine-mse" needs a cosine head; found "{head}',
            )
            for head in sorted({*HEADS} - {"cosine", "projected-cosine", "cosine-1d", "simcse"})
        ),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    assert refusal(lambda: check_task(replace(BUILT_IN[name], **changes))).startswith(message)


@given(
    st.sampled_from(["sst", "cfimdb", "quora", "sts"]),
    st.sampled_from(sorted(HEADS)),
    st.sampled_from(["", *sorted(LOSSES)]),
)
def test_a_task_that_passes_can_be_computed(name: str, head: str, loss: str) -> None:
    try:
        task = check_task(replace(BUILT_IN[name], head=head, loss=loss))
    except MinbertError:
        return
    assert task.kind in LOSSES[task.loss]
    assert task.is_pair or head in SINGLE
    assert task.outputs == 1 or (head not in ONE_NUMBER and task.outputs == len(task.classes))
    assert task.outputs == 1 or task.loss == "cross-entropy"
    assert (task.loss == "bce") <= (len(task.classes) == 2)


# --- and out again --------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
shares = st.floats(0, 0.99)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    own = Task(
        draw(texts.filter(lambda name: name.strip() and name.isprintable() and not set(name) & set("/\\.*"))),
        "classification",
        tuple(draw(st.lists(texts, min_size=1, max_size=3))),
        text=draw(texts),
        classes=tuple(draw(st.lists(texts, min_size=2, max_size=4, unique=True))),
        pooling=draw(st.sampled_from([None, "mean"])),
        dropout=draw(st.one_of(st.none(), shares)),
        label_smoothing=draw(shares),
        normalise=draw(st.booleans()),
    )
    tasks = {"sts": BUILT_IN["sts"], "quora": BUILT_IN["quora"], own.name: own}
    weights = draw(st.dictionaries(st.sampled_from(sorted(tasks)), st.floats(0, 1e30), max_size=3))
    return Recipe(
        tuple(check_task(tasks[name]) for name in draw(st.permutations(sorted(tasks)))),
        draw(texts),
        draw(texts),
        draw(texts),
        draw(st.integers(0, 2**63 - 1)),
        ModelConfig(draw(texts), dropout=draw(shares), encoder_dropout=draw(st.none() | shares)),
        SamplerConfig("weighted", weights=weights),
        OptimizerConfig(lr=draw(st.floats(0, 10)), eps=draw(st.floats(0, 1)), betas=draw(st.tuples(shares, shares))),
        TrainingConfig(epochs=draw(st.integers(1, 10**9))),
    )


@pytest.mark.parametrize("name", ["", "  ", "a/b", "/tmp/x", "..", "a.b", "*", "a\nb"])
def test_a_task_whose_name_cannot_be_a_files_is_refused(name: str) -> None:
    with pytest.raises(MinbertError, match="a task is named"):
        check_task(replace(BUILT_IN["sst"], name=name))


def test_a_task_may_be_named_like_a_table() -> None:
    one, other = (parse(f'[tasks.stages]\nlike = "sst"\nweight = {weight}') for weight in (1, 2))
    assert differences(one, one) == []
    assert differences(one, other) == ["tasks.stages.weight: 1.0, was 2.0"]


@settings(deadline=None)  # of a busy machine nothing is expected
@given(recipes())
def test_toml_round_trip(recipe: Recipe) -> None:
    again = parse(to_toml(recipe))
    assert again == recipe
    assert differences(again, recipe) == []
    assert parse_recipe(as_dict(recipe)) == recipe


def test_the_file_round_trip(write: Write) -> None:
    recipe = read_recipe(write('name = "Ünïcode 😀 \\u007f"\n' + MULTITASK))
    assert read_recipe(write(to_toml(recipe))) == recipe


def test_differences_are_a_line_each(write: Write) -> None:
    one = read_recipe(write(MULTITASK))
    sets = ["optimizer.lr=2e-5", "tasks.sst.head=mlp", "sampler.weights.sts=3", "model.encoder_dropout=0.5"]
    other = read_recipe(write(MULTITASK), sets=sets)
    assert differences(other, one) == [
        "model.encoder_dropout: 0.5, was nothing",
        "optimizer.lr: 2e-05, was 1e-05",
        "sampler.weights.sts: 3.0, was nothing",
        "tasks.sst.head: mlp, was linear",
    ]
    assert differences(one, one) == []


# --- where the data lies --------------------------------------------------------------------------------------------


def test_the_data_folder_by_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, named, embedded = (parse(f"{line}\n[tasks.sst]") for line in ("", 'data = "mine"', 'data = "embedded"'))
    monkeypatch.setenv("MINBERT_DATA", "from-environment")
    assert data_folder(embedded, tmp_path) == tmp_path
    assert data_folder(named, "embedded") == SAMPLE
    assert data_folder(embedded) == SAMPLE
    assert data_folder(named) == Path("from-environment")
    monkeypatch.setenv("MINBERT_DATA", "")
    assert data_folder(named) == Path("mine")
    monkeypatch.delenv("MINBERT_DATA")
    assert data_folder(plain) == Path("data")
    assert SAMPLE.is_dir()
