"""Ensembles: the mean worked by hand and against the members themselves, their folders, and recipes that train them."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minbert
from minbert import ensembles
from minbert.config import EnsembleConfig
from minbert.data.inputs import tokenize
from minbert.data.raw import Examples
from minbert.data.tokenizer import Tokenizer
from minbert.delivery.predictor import Ensemble, Predictor
from minbert.delivery.submit import submit
from minbert.ensembles import best_snapshots, ensemble
from minbert.errors import MinbertError
from minbert.evaluating import evaluate_model
from minbert.evaluation.metrics import metrics_of
from minbert.evaluation.report import write_report
from minbert.evaluation.results import compare_runs, read_predictions, read_results
from minbert.experiment import Run, train
from minbert.model import saved
from minbert.model.answers import Decision, decode, mean_outputs
from minbert.model.manifest import read_manifest, update_manifest
from minbert.model.saved import load_model, save_model
from minbert.recipes import members_of, parse_recipe
from minbert.task_checks import check_task
from minbert.tasks import BUILT_IN
from tests.models import PAIRS, TEXTS, THREE, make
from tests.runs import CtrlC, Listener, Stopped, left_behind, small_recipe, unlike

PLAIN: dict[str, dict[str, Any]] = {**THREE, "score": {"kind": "regression", "train": "a.tsv"}}
OTHER: dict[str, dict[str, Any]] = {
    "sst": {"head": "mlp"},
    "quora": {"head": "ph", "loss": "cross-entropy"},
    "sts": {"head": "cosine", "pooling": "mean"},
    "score": {"kind": "regression", "train": "a.tsv", "loss": "bce-threshold"},
}
"""The same tasks by other heads and losses, which read their texts in other ways."""


def save(folder: Path, encoder: Path, tasks: Mapping[str, Any] = PLAIN, *, seed: int = 1, **model: Any) -> Path:
    tokenizer, built, manifest = make(encoder, tasks, seed=seed, **model)
    save_model(folder, built, tokenizer, manifest)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path, tiny_folder: Path) -> list[Path]:
    """Two that differ in their weights alone, one of other heads, one of another encoder and vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    return [
        save(folder / "one", tiny_encoder, seed=1),
        save(folder / "two", tiny_encoder, seed=2),
        save(folder / "heads", tiny_encoder, OTHER, seed=3, pooling="max"),
        save(folder / "encoder", tiny_folder, {**PLAIN, "quora": {"head": "cosine"}}, seed=4, max_tokens=20),
    ]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, models: list[Path]) -> Path:
    """The folder of an ensemble of all of them. To be read only."""
    return ensemble(tmp_path_factory.mktemp("ensembles") / "all", models)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(MinbertError) as caught:
        call()
    return str(caught.value)


# --- the mean -------------------------------------------------------------------------------------------------------


def outputs(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def logit(probability: float) -> float:
    return float(np.log(probability / (1 - probability)))


def test_the_mean_of_probabilities_by_hand() -> None:
    """0.9, and 0.2 from two logits: 0.55. Of the logits it would be (2.197 - 1.386) / 2, a probability of 0.6."""
    bce, both = BUILT_IN["quora"], replace(BUILT_IN["quora"], loss="cross-entropy")
    given = [outputs(logit(0.9)), outputs(np.log(0.8), np.log(0.2))]
    for task in (check_task(bce), check_task(both)):
        found = decode(task, mean_outputs(task, [check_task(bce), check_task(both)], given))
        np.testing.assert_allclose(found.probabilities, [[0.45, 0.55]], atol=1e-6)
        assert found.predictions == [1.0]


def test_the_mean_of_five_classes_by_hand() -> None:
    task = check_task(BUILT_IN["sst"])
    given = [np.log([[0.6, 0.1, 0.1, 0.1, 0.1]]), np.log([[1.0, 0.5, 0.3, 0.1, 0.1]])]
    given[1][0, 0] = -1e9  # a class that one model rules out
    found = decode(task, mean_outputs(task, [task, task], given))
    np.testing.assert_allclose(found.probabilities, [[0.3, 0.3, 0.2, 0.1, 0.1]], atol=1e-6)


def test_the_mean_of_scores_by_hand() -> None:
    """7 is clipped to the top of the scale before it counts: (5 + 2) / 2; half of a scale of 0 to 5 is 2.5."""
    plain, high = check_task(BUILT_IN["sts"]), check_task(replace(BUILT_IN["sts"], loss="bce-threshold"))
    for task in (plain, high):
        clipped = mean_outputs(task, [plain, plain], [outputs(7.0), outputs(2.0)])
        np.testing.assert_allclose(decode(task, clipped).predictions, [3.5], atol=1e-6)
        mixed = mean_outputs(task, [plain, high], [outputs(1.0), outputs(0.0)])
        np.testing.assert_allclose(decode(task, mixed).predictions, [(1 + 2.5) / 2], atol=1e-6)


def test_certainty_stays_finite() -> None:
    """Probabilities of exactly 0 and 1, and scores at both ends of the scale."""
    for task in (BUILT_IN["sst"], BUILT_IN["quora"], replace(BUILT_IN["sts"], loss="bce-threshold")):
        task = check_task(task)
        sure = np.full((2, task.outputs), -1e4)
        sure[:, 0] = [1e4, -1e4]
        found = mean_outputs(task, [task], [sure])
        assert np.isfinite(found).all()
        expected = decode(task, sure)
        np.testing.assert_allclose(decode(task, found).predictions, expected.predictions, atol=1e-6)


@pytest.mark.parametrize("chosen", [[0, 1], [0, 2], [2, 0], [3, 0, 1, 2]])
def test_it_says_the_mean_of_what_its_members_say(models: list[Path], tmp_path: Path, chosen: list[int]) -> None:
    folders = [models[number] for number in chosen]
    found = Predictor.load(ensemble(tmp_path / "both", folders)).answers(TEXTS, PAIRS)
    alone = [Predictor.load(folder).answers(TEXTS, PAIRS) for folder in folders]
    assert list(found) == list(PLAIN)
    for name, answers in found.items():
        if answers.probabilities is None:
            expected = np.mean([one[name].predictions for one in alone], axis=0)
            np.testing.assert_allclose(answers.predictions, expected, atol=1e-6)
        else:
            mean = np.mean([one[name].probabilities for one in alone], axis=0)
            np.testing.assert_allclose(answers.probabilities, mean, atol=1e-6)


def test_the_decisions_are_the_ensembles_own(models: list[Path], tmp_path: Path) -> None:
    folders = [Path(shutil.copytree(model, tmp_path / model.name)) for model in models[:2]]
    for folder in folders:
        decided = {"sst": Decision(temperature=5.0), "quora": Decision(threshold=0.999)}
        update_manifest(folder, replace(read_manifest(folder), decisions=decided))
    both = ensemble(tmp_path / "both", folders)
    plain = Predictor.load(ensemble(tmp_path / "plain", models[:2])).answers(TEXTS, PAIRS)
    found = Predictor.load(both).answers(TEXTS, PAIRS)
    np.testing.assert_array_equal(found["sst"].probabilities, plain["sst"].probabilities)
    assert plain["quora"].probabilities is not None
    update_manifest(both, replace(read_manifest(both), decisions={"quora": Decision(threshold=0.0)}))
    assert (Predictor.load(both).answers(TEXTS, PAIRS)["quora"].predictions == 1).all()


def test_each_distinct_text_is_tokenized_once_for_each_tokenizer(
    together: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None = None, **options: Any) -> Any:
        rows = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        seen.extend((self.vocab_size, row) for row in rows)
        return encode(self, texts, pairs, **options)

    predictor = Predictor.load(together)
    monkeypatch.setattr(Tokenizer, "encode", counted)
    predictor.predict([*TEXTS, *TEXTS], [*PAIRS, *PAIRS])
    assert len(seen) == len(set(seen)), "none twice"
    assert len({size for size, _ in seen}) == 2


def test_rows_that_are_tokenized_already(together: Path) -> None:
    """As dev is: members that read it otherwise tokenize the texts themselves, or say that they need them."""
    predictor = Predictor.load(together)
    expected = predictor.outputs(TEXTS, PAIRS)
    for name, task in predictor.tasks.items():
        examples = Examples([], TEXTS, PAIRS if task.is_pair else None, None)
        inputs = tokenize(task, examples, predictor.tokenizer, predictor.max_tokens)
        np.testing.assert_allclose(predictor.outputs_of(inputs, examples), expected[name], atol=1e-5)
        assert "expected its texts" in refusal(lambda inputs=inputs: predictor.outputs_of(inputs))


def test_members_that_read_alike_need_no_texts(models: list[Path], tmp_path: Path) -> None:
    predictor = Predictor.load(ensemble(tmp_path / "both", models[:2]))
    inputs = tokenize(predictor.tasks["sst"], Examples([], TEXTS, None, None), predictor.tokenizer, 64)
    np.testing.assert_allclose(predictor.outputs_of(inputs), predictor.outputs(TEXTS, tasks=["sst"])["sst"], atol=1e-5)


def test_it_can_be_pickled_and_shared_by_threads(together: Path) -> None:
    predictor = Predictor.load(together)
    expected = predictor.predict(TEXTS, PAIRS)
    again = pickle.loads(pickle.dumps(predictor))
    assert isinstance(again, Ensemble)
    assert again.predict(TEXTS, PAIRS) == expected
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: predictor.predict(TEXTS, PAIRS), range(8))) == [expected] * 8


def test_nothing_asked_nothing_said(together: Path) -> None:
    assert Predictor.load(together).predict([], []) == {name: [] for name in PLAIN}


@pytest.mark.parametrize(("options", "atol"), [({"backend": "onnx"}, 1e-4), ({"precision": "int8"}, 0.3)])
def test_in_onnx_runtime(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], atol: float
) -> None:
    """The same backend for every member, so the mean of what they say there."""
    monkeypatch.setenv("MINBERT_HOME", str(tmp_path / "home"))
    predictor = Predictor.load(ensemble(tmp_path / "both", models[:2]), **options)
    found = predictor.answers(TEXTS, PAIRS)["sst"].probabilities
    alone = [Predictor.load(model, **options).answers(TEXTS, PAIRS)["sst"].probabilities for model in models[:2]]
    np.testing.assert_allclose(found, np.mean(alone, axis=0), atol=1e-5)  # type: ignore[arg-type]
    exact = Predictor.load(tmp_path / "both").answers(TEXTS, PAIRS)["sst"].probabilities
    np.testing.assert_allclose(found, exact, atol=atol)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(predictor)).predict(TEXTS) == predictor.predict(TEXTS)


def test_an_ensemble_has_no_single_embedding(together: Path) -> None:
    predictor = Predictor.load(together)
    expected = "an ensemble of 4 models has no single embedding; expected one of its members"
    assert refusal(lambda: predictor.embed(TEXTS)) == expected


# --- the folder -----------------------------------------------------------------------------------------------------


def test_the_folder_holds_its_members(together: Path, models: list[Path]) -> None:
    assert read_manifest(together).members == ("members/1", "members/2", "members/3", "members/4")
    assert read_manifest(together).tasks == read_manifest(models[0]).tasks
    for number, model in enumerate(models, start=1):
        member = together / "members" / str(number)
        assert left_behind(member) == left_behind(model)
        weights = "encoder/model.safetensors"
        assert (member / weights).samefile(model / weights), "a link takes no room"


def test_changing_a_model_does_not_change_the_ensemble(models: list[Path], tmp_path: Path, tiny_encoder: Path) -> None:
    one = Path(shutil.copytree(models[0], tmp_path / "one"))
    both = ensemble(tmp_path / "both", [one, models[1]])
    before = left_behind(both)
    update_manifest(one, replace(read_manifest(one), recipe="another"))
    save(one, tiny_encoder, seed=9)
    shutil.rmtree(one)
    assert left_behind(both) == before


def test_where_no_links_can_be_made_it_copies(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = ensemble(tmp_path / "linked", models[:2])

    def refused(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(saved.os, "link", refused)
    copied = ensemble(tmp_path / "copied", models[:2])
    assert left_behind(copied) == left_behind(linked)
    weights = "members/1/encoder/model.safetensors"
    assert not (copied / weights).samefile(linked / weights)


def test_a_full_disk_leaves_nothing_half(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ensemble(tmp_path / "both", models[:2])
    before = left_behind(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved, "_link", full)
    assert "could not be saved" in refusal(lambda: ensemble(both, models[1:3], overwrite=True))
    assert left_behind(tmp_path) == before


def test_runs_and_ensembles_stand_for_their_models(models: list[Path], tmp_path: Path) -> None:
    shutil.copytree(models[0], tmp_path / "run" / "model")
    both = ensemble(tmp_path / "both", [tmp_path / "run", models[1]])
    three = ensemble(str(tmp_path / "three"), [str(both), str(models[2])])
    assert left_behind(three / "members") == left_behind(ensemble(tmp_path / "flat", models[:3]) / "members")


def test_overwrite(models: list[Path], tmp_path: Path) -> None:
    both = ensemble(tmp_path / "both", models[:2])
    assert refusal(lambda: ensemble(both, models[1:3])) == (
        f"{both} is there already; expected a new folder, or --overwrite"
    )
    assert len(read_manifest(ensemble(both, models, overwrite=True)).members) == 4
    (tmp_path / "data").mkdir()
    message = refusal(lambda: ensemble(tmp_path / "data", models, overwrite=True))
    assert message.endswith("no minbert.json; expected a model folder to replace")
    assert "is one of the models" in refusal(lambda: ensemble(both, [both, models[2]], overwrite=True))


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({"sst": {}}, "has the tasks sst; expected those of {one}: quora, score, sst, sts"),
        (
            {**PLAIN, "score": {"like": "sst"}},
            ": the kind of score is classification; expected regression, as {one} has it",
        ),
        (
            {**PLAIN, "quora": {"classes": ["no", "yes"]}},
            ": the list of classes of quora is no, yes; expected different, duplicate, as {one} has it",
        ),
        ({**PLAIN, "sts": {"high": 4.0}}, ": the scale of sts is 0.0 to 4.0; expected 0.0 to 5.0, as {one} has it"),
        ({**PLAIN, "sst": {"normalise": True}}, ": the normalise of sst is true; expected false, as {one} has it"),
    ],
)
def test_models_that_answer_other_questions(
    models: list[Path], tiny_encoder: Path, tmp_path: Path, tasks: dict[str, Any], expected: str
) -> None:
    other = save(tmp_path / "other", tiny_encoder, tasks)
    message = refusal(lambda: ensemble(tmp_path / "both", [models[0], other]))
    assert message == f"{other}{' ' if expected[0] == 'h' else ''}{expected.format(one=models[0])}"
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize("kind", ["contrastive", "masked"])
def test_tasks_without_answers_are_refused(tiny_encoder: Path, tmp_path: Path, kind: str) -> None:
    one = save(tmp_path / "one", tiny_encoder, {"sst": {}, "quora": {"kind": kind}})
    message = refusal(lambda: ensemble(tmp_path / "both", [one, one]))
    assert message == f"{one}: quora is a {kind} task, which has no answers to take the mean of"


def test_too_few_and_missing_models(models: list[Path], tmp_path: Path) -> None:
    assert refusal(lambda: ensemble(tmp_path / "a", [])) == "an ensemble of 0 models; expected two or more"
    assert refusal(lambda: ensemble(tmp_path / "a", models[:1])) == "an ensemble of 1 models; expected two or more"
    assert "expected a list of folders" in refusal(lambda: ensemble(tmp_path / "a", str(models[0])))
    message = refusal(lambda: ensemble(tmp_path / "a", [models[0], tmp_path / "nowhere"]))
    assert message.endswith("no such file; expected a model folder, such as RUN/model")


def test_an_ensemble_is_no_single_model(together: Path) -> None:
    assert refusal(lambda: load_model(together)) == f"{together}: an ensemble of 4 models; expected a single one"


@pytest.mark.parametrize("members", [["../one"], ["/one"], [""], [3]])
def test_members_elsewhere_are_refused(together: Path, tmp_path: Path, members: list[Any]) -> None:
    folder = Path(shutil.copytree(together, tmp_path / "all"))
    path = folder / "minbert.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"members": members}))
    assert "expected folders below, such as members/1" in refusal(lambda: Predictor.load(folder))


# --- every command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path, small_data: Path) -> list[Run]:
    """Three finished runs, the last of other heads."""
    folder = tmp_path_factory.mktemp("runs")
    short = {"training": {"epochs": 1, "batch_size": 12, "train_sample": 8}}
    recipes = [
        small_recipe(tiny_encoder, seed=1, **short),
        small_recipe(tiny_encoder, seed=2, **short),
        small_recipe(tiny_encoder, tasks={"quora": {"head": "cosine"}, "sts": {"head": "ph"}}, **short),
    ]
    return [
        train(recipe, out=folder / str(number), data=small_data, device="cpu") for number, recipe in enumerate(recipes)
    ]


def test_evaluate_and_predict_agree(runs: list[Run], small_data: Path, tmp_path: Path) -> None:
    """Members of different views: dev is read anew for those that need it, and says what the texts say."""
    folder = ensemble(tmp_path / "all", [run.folder for run in runs])
    found = evaluate_model(folder, data=small_data, device="cpu", samples=20)
    predictor = Predictor.load(folder)
    for name, evaluation in found.items():
        rows = read_predictions(runs[0].folder, name)
        pairs = [row["text2"] for row in rows.rows] if "text2" in rows.rows[0] else None
        answers = predictor.answers([row["text"] for row in rows.rows], pairs, [name])[name]
        np.testing.assert_allclose(evaluation.answers.predictions, answers.predictions, atol=1e-5)
        metric = metrics_of(evaluation.task.kind)[evaluation.task.metric_name]
        assert evaluation.score == pytest.approx(metric(rows.column("label"), answers.predictions), abs=1e-5)


def test_tuned_on_dev(runs: list[Run], small_data: Path, tmp_path: Path) -> None:
    models = [run.model for run in runs]
    folder = minbert.ensemble(tmp_path / "all", models, tune=True, data=small_data, device="cpu")
    manifest = read_manifest(folder)
    assert set(manifest.decisions) == {"sst", "quora", "sts"}
    assert manifest.decisions["sst"].temperature != 1.0
    plain = evaluate_model(minbert.ensemble(tmp_path / "plain", models), data=small_data, device="cpu", samples=5)
    for name, found in plain.items():
        assert manifest.scores["dev"][name]["metrics"][found.task.metric_name]["value"] == pytest.approx(found.score)
    tuned = evaluate_model(folder, data=small_data, device="cpu", samples=5)
    assert tuned["quora"].metrics["accuracy"].value >= plain["quora"].metrics["accuracy"].value


def test_submit(runs: list[Run], small_data: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(ensemble(tmp_path / "all", [run.folder for run in runs]))
    written = [found for found in submit(predictor, small_data, tmp_path / "out") if not found.missing]
    assert [found.path.name for found in written] == ["sst-dev-output.csv", "para-dev-output.csv", "sts-dev-output.csv"]
    assert all(found.rows == 12 for found in written)


# --- snapshots ------------------------------------------------------------------------------------------------------

OFTEN = {"epochs": 2, "batch_size": 12, "evaluate_every": 2, "checkpoint_every": 3, "train_sample": 8, "snapshots": 3}


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "models").glob("step-*"))


@pytest.fixture(scope="module")
def snapped(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path, small_data: Path) -> Run:
    recipe = small_recipe(tiny_encoder, training=OFTEN)
    return train(recipe, out=tmp_path_factory.mktemp("snapped") / "run", data=small_data, device="cpu")


def test_the_best_evaluations_are_kept(snapped: Run, small_data: Path) -> None:
    lines = [json.loads(line) for line in (snapped.folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert len(evaluations) == 6
    best = sorted(evaluations, key=lambda line: (-line["aggregate"], line["step"]))[:3]
    assert [one["step"] for one in snapped.results["snapshots"]] == [line["step"] for line in best]
    assert steps_of(snapped.folder) == sorted(line["step"] for line in best)
    for one, line in zip(snapped.results["snapshots"], best, strict=True):
        assert one["aggregate"] == line["aggregate"]
        assert one["scores"] == line["scores"]["dev"]
        found = evaluate_model(snapped.folder / one["folder"], data=small_data, device="cpu", samples=5)
        assert {name: each.score for name, each in found.items()} == pytest.approx(one["scores"])
    chosen = snapped.folder / snapped.results["snapshots"][0]["folder"]
    assert (chosen / "heads.safetensors").read_bytes() == (snapped.model / "heads.safetensors").read_bytes()


def test_snapshots_change_nothing_else(snapped: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = small_recipe(tiny_encoder, training=OFTEN | {"snapshots": 0})
    plain = train(recipe, out=tmp_path / "run", data=small_data, device="cpu")
    assert "snapshots" not in plain.results
    assert not (tmp_path / "run" / "models").exists()
    assert (plain.model / "heads.safetensors").read_bytes() == (snapped.model / "heads.safetensors").read_bytes()


@pytest.mark.parametrize("stop", [{"at_step": 5}, {"at_step": 9}, {"at_evaluation": 4}, {"at_evaluation": 10}])
def test_a_stopped_run_ends_with_the_same_snapshots(
    snapped: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path, stop: dict[str, int]
) -> None:
    recipe, run = small_recipe(tiny_encoder, training=OFTEN), tmp_path / "run"
    with pytest.raises(Stopped):
        train(recipe, out=run, data=small_data, device="cpu", watcher=Listener(**stop))
    train(recipe, out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, snapped.folder) == []


def test_what_is_left_of_a_removed_snapshot_goes_when_the_run_goes_on(
    snapped: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(snapped.folder, tmp_path / "run"))
    (run / "models" / "step-00000001").mkdir()
    train(small_recipe(tiny_encoder, training=OFTEN), out=run, data=small_data, device="cpu", resume=True)
    assert unlike(run, snapped.folder) == []


def test_a_snapshot_lost_to_a_full_disk(
    snapped: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, lists only what is there, and its chosen model is none the worse for it."""
    from minbert import experiment

    recipe, run, listener = small_recipe(tiny_encoder, training=OFTEN), tmp_path / "run", Listener()
    save_really = experiment.save_model

    def full(folder: Path, *rest: Any) -> None:
        if folder.name.startswith("step-") and int(folder.name[5:]) > 4:
            raise OSError(28, "No space left on device")
        save_really(folder, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "save_model", full)
        found = train(recipe, out=run, data=small_data, device="cpu", watcher=listener)
    assert {one["step"] for one in found.results["snapshots"]} == set(steps_of(run)) == {2, 4}
    assert "the model could not be saved (No space left on device); training goes on" in listener.warnings
    assert (run / "model" / "heads.safetensors").read_bytes() == (snapped.model / "heads.safetensors").read_bytes()


# --- recipes --------------------------------------------------------------------------------------------------------

ENSEMBLE: dict[str, Any] = {
    "training": {
        "epochs": 2,
        "batch_size": 12,
        "evaluate_every": 2,
        "train_sample": 8,
        "best": "task",
        "best_task": "sst",
    },
    "ensemble": {"runs": 2, "models": 3},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path, small_data: Path) -> Run:
    recipe = small_recipe(tiny_encoder, seed=5, **ENSEMBLE)
    return train(recipe, out=tmp_path_factory.mktemp("trained") / "run", data=small_data, device="cpu")


def test_a_recipe_trains_its_ensemble(trained: Run, small_data: Path) -> None:
    """The best snapshots of both runs by the recipe's own rule, and their mean scored as a run's model is."""
    alone = {seed: read_results(trained.folder / "runs" / str(seed)) for seed in (5, 1005)}
    every = sorted((-one["scores"]["sst"], seed, one["step"]) for seed in alone for one in alone[seed]["snapshots"])
    assert [(one["seed"], one["step"]) for one in trained.results["members"]] == [place[1:] for place in every[:3]]
    for number, one in enumerate(trained.results["members"], start=1):
        kept = trained.folder / one["folder"] / "heads.safetensors"
        assert kept.samefile(trained.model / "members" / str(number) / "heads.safetensors")
    found = evaluate_model(trained.model, data=small_data, device="cpu", samples=5)
    for name, evaluation in found.items():
        if not evaluation.task.is_classification:  # whose answers no decision changes
            value = trained.results["dev"][name]["metrics"]["pearson"]["value"]
            assert evaluation.score == pytest.approx(value)
        else:
            value = trained.results["tuned_on_dev"][name]["metrics"]["accuracy"]["value"]
            assert evaluation.metrics["accuracy"].value == pytest.approx(value)
    assert trained.results["steps"] == sum(results["steps"] for results in alone.values()) == 24
    assert set(alone[5]) - set(trained.results) == {"snapshots", "geometry", "stages", "masked_layers"}
    assert set(trained.results) - set(alone[5]) == {"members"}
    assert read_manifest(trained.model).scores["overall"] == trained.results["overall"]


def test_the_runs_are_the_recipes_own(trained: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    (_, second) = members_of(small_recipe(tiny_encoder, seed=5, **ENSEMBLE))
    assert (second.seed, second.training.snapshots, second.ensemble) == (1005, 3, EnsembleConfig())
    train(second, out=tmp_path / "run", data=small_data, device="cpu")
    assert unlike(tmp_path / "run", trained.folder / "runs" / "1005") == []


def test_best_snapshots_by_hand() -> None:
    def kept(*aggregates: float) -> dict[str, Any]:
        return {"snapshots": [{"folder": f"models/{n}", "step": n, "aggregate": a} for n, a in enumerate(aggregates)]}

    found = best_snapshots({1: kept(0.5, 0.9), 2: kept(0.9, 0.7, 0.1)}, 3)
    assert [one["folder"] for one in found] == ["runs/1/models/1", "runs/2/models/0", "runs/2/models/1"]
    assert len(best_snapshots({1: kept(0.5)}, 3)) == 1


class StopAfter(Listener):
    """Stops when so many steps were made, of whatever run."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.most = steps

    def stepped(self, step: int, record: Mapping[str, Any] | None) -> None:
        super().stepped(step, record)
        if len(self.steps) == self.most:
            self.stop()


@pytest.mark.parametrize("stops", [[5], [12], [17], [24], [3, 20]])
def test_a_stopped_ensemble_ends_with_the_same_bytes(
    trained: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path, stops: list[int]
) -> None:
    """In the first run, at its last step, in the second, at its last step, and in one after the other."""
    recipe, out = small_recipe(tiny_encoder, seed=5, **ENSEMBLE), tmp_path / "run"
    for stop in stops:
        with pytest.raises(Stopped):
            train(recipe, out=out, data=small_data, device="cpu", resume=out.exists(), watcher=StopAfter(stop))
    assert (out / "runs" / "1005").exists() == (stops[-1] > 12)
    train(recipe, out=out, data=small_data, device="cpu", resume=True)
    assert unlike(out, trained.folder) == []


class CtrlCAfter(CtrlC, StopAfter):
    pass


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("stops", [[5], [12], [17], [24], [3, 17]])
def test_ctrl_c_in_an_ensemble_loses_no_step(
    trained: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path, stops: list[int]
) -> None:
    recipe, out, done = small_recipe(tiny_encoder, seed=5, **ENSEMBLE), tmp_path / "run", []
    for stop in stops:
        listener = CtrlCAfter(stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out=out, data=small_data, device="cpu", resume=out.exists(), watcher=listener)
        done += listener.steps
    last = Listener()
    train(recipe, out=out, data=small_data, device="cpu", resume=True, watcher=last)
    assert done + last.steps == 2 * list(range(1, 13))
    assert unlike(out, trained.folder) == []


@pytest.mark.parametrize("where", ["save_ensemble", "finish"])
def test_stopped_after_the_last_step(
    trained: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    recipe, out = small_recipe(tiny_encoder, seed=5, **ENSEMBLE), tmp_path / "run"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ensembles, where, full)
        assert "No space left on device" in refusal(lambda: train(recipe, out=out, data=small_data, device="cpu"))
    listener = Listener()
    train(recipe, out=out, data=small_data, device="cpu", resume=True, watcher=listener)
    assert listener.steps == []
    assert unlike(out, trained.folder) == []


def test_stopped_in_the_second_run_the_first_is_not_trained_again(
    trained: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    recipe, out = small_recipe(tiny_encoder, seed=5, **ENSEMBLE), tmp_path / "run"
    shutil.copytree(trained.folder, out)
    shutil.rmtree(out / "runs" / "1005")
    shutil.rmtree(out / "model")
    (out / "results.json").unlink()
    listener = Listener()
    train(recipe, out=out, data=small_data, device="cpu", resume=True, watcher=listener)
    assert listener.steps == list(range(1, 13))
    assert unlike(out, trained.folder) == []


def test_a_run_whose_models_were_removed_is_trained_again(
    trained: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    """`minbert reproduce` keeps results only."""
    recipe, out = small_recipe(tiny_encoder, seed=5, **ENSEMBLE), tmp_path / "run"
    shutil.copytree(trained.folder, out)
    for name in ("model", "runs/1005/model", "runs/1005/models", "runs/1005/checkpoints"):
        shutil.rmtree(out / name)
    (out / "results.json").unlink()
    again = train(recipe, out=out, data=small_data, device="cpu", resume=True)
    assert again.results["dev"] == trained.results["dev"]


def test_overwriting_leaves_nothing_of_the_older_run(
    trained: Run, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(trained.folder, tmp_path / "run"))
    (out / "runs" / "not-ours").mkdir()
    single = small_recipe(tiny_encoder, "sst", training={"epochs": 1})
    assert "holds a run already" in refusal(lambda: train(single, out=out, data=small_data, device="cpu"))
    train(single, out=out, data=small_data, device="cpu", overwrite=True)
    assert [path.name for path in (out / "runs").iterdir()] == ["not-ours"]
    assert read_manifest(out / "model").members == ()


def test_fewer_snapshots_than_asked_for(tiny_encoder: Path, small_data: Path, tmp_path: Path) -> None:
    """Early stopping, or a recipe cut short: those there are, and a word about it."""
    recipe, listener = small_recipe(tiny_encoder, **ENSEMBLE), Listener()
    recipe = replace(recipe, training=replace(recipe.training, epochs=1, evaluate_every=0))
    run = train(recipe, out=tmp_path / "run", data=small_data, device="cpu", watcher=listener)
    assert listener.warnings == ["the runs kept 2 snapshots; ensemble.models is 3"]
    assert len(run.results["members"]) == 2


def test_report_and_compare(trained: Run, runs: list[Run], tmp_path: Path) -> None:
    write_report([trained.folder, trained.folder / "runs" / "5"], tmp_path / "report.html")
    assert "Comparison of 2 runs" in (tmp_path / "report.html").read_text()
    found = compare_runs(runs[0].folder, trained.folder, rng=np.random.default_rng(1), samples=50)
    assert set(found) == {"sst", "quora", "sts"}


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"ensemble": {"runs": 2}}, "ensemble.runs is 2 and ensemble.models 0; expected 1 or more models"),
        (
            {"ensemble": {"runs": 2, "models": 5}, "training": {"epochs": 2}},
            "ensemble.models is 5; 2 runs keep 4 snapshots at most: "
            "expected fewer models, or more runs, epochs or training.snapshots",
        ),
        (
            {"ensemble": {"models": 3}, "training": {"snapshots": 2, "epochs": 9}},
            "ensemble.models is 3; 1 runs keep 2 snapshots at most: "
            "expected fewer models, or more runs, epochs or training.snapshots",
        ),
        ({"ensemble": {"runs": 0, "models": 1}}, "ensemble.runs is 0; expected 1 or more"),
        ({"ensemble": {"model": 1}}, 'unknown key "model" (did you mean "models"?); known: models, runs'),
        ({"training": {"snapshots": -1}}, "training.snapshots is -1; expected 0 or more"),
        *(
            (
                {
                    "ensemble": {"models": 1},
                    "tasks": {"sst": {}, "beside": {"kind": kind, "train": "a.tsv", "text": "a"}},
                },
                f"ensemble.models is 1, and beside is a {kind} task, which has no answers to take the mean of; "
                "expected it in a stage, or no ensemble",
            )
            for kind in ("contrastive", "masked")
        ),
    ],
)
def test_recipes_that_cannot_be(tables: dict[str, Any], expected: str) -> None:
    """Said before any training."""
    assert refusal(lambda: parse_recipe({"tasks": {"sst": {}}, **tables})).endswith(expected)


def test_snapshots_are_enough_with_more_evaluations() -> None:
    recipe = parse_recipe(
        {"tasks": {"sst": {}}, "ensemble": {"models": 5}, "training": {"epochs": 1, "evaluate_every": 9}}
    )
    assert members_of(recipe)[0].training.snapshots == 5
