"""What is to be run, what counts as done, and what is refused before any run."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from minbert import cli
from minbert.errors import MinbertError, MissingExtraError
from minbert.model.pretrained import weights_digest
from minbert.recipes import as_dict, revisions, write_started
from minbert.reproduction.found import load_results
from minbert.reproduction.jobs import (
    Settings,
    begun_otherwise,
    check_page,
    check_ready,
    check_sets,
    longest_part,
    made_otherwise,
    was_cut,
)
from minbert.reproduction.page import build_page
from minbert.reproduction.recipes import Paper, choose_rows, find_papers
from minbert.reproduction.runs import run_jobs
from tests.reproduction.made_up import STAGE, Impatient, Listener, is_done, jobs_of, notes_of, real_settings, written


def test_papers_are_folders_and_bases_are_no_rows(papers: dict[str, Paper]) -> None:
    assert {name: list(paper.rows) for name, paper in papers.items()} == {
        "smith": ["1-plain", "2-mean", "3-other"],
        "afterwards": ["one"],
    }
    assert papers["smith"].rows["2-mean"].reported.dev == {"sst": 0.5, "sts": 0.7}
    assert papers["smith"].claims.findings[1].kind == "no better"
    assert papers["afterwards"].claims.findings == ()


def test_the_most_telling_rows_come_first_and_more_seeds_last(papers: dict[str, Paper]) -> None:
    order = [f"{job.row.name}:{job.seed}" for job in jobs_of(papers, seeds=3)]
    assert order == [
        *("2-mean:1", "1-plain:1", "3-other:1", "one:1"),
        *("2-mean:2", "2-mean:3", "1-plain:2", "1-plain:3"),
        *("3-other:2", "one:2", "3-other:3", "one:3"),
    ]


def test_rows_by_name(papers: dict[str, Paper]) -> None:
    assert [row.key for row in choose_rows(papers, ["smith/3-other", "smith"])] == [
        "smith/3-other",
        "smith/1-plain",
        "smith/2-mean",
    ]
    with pytest.raises(MinbertError, match=r'no paper "smit" \(did you mean "smith"\?\); expected one of: smith, '):
        choose_rows(papers, ["smit"])
    with pytest.raises(MinbertError, match=r'smith has no row "2-meen" \(did you mean "2-mean"\?\)'):
        choose_rows(papers, ["smith/2-meen"])


def test_claims_about_rows_that_are_not_there(recipes: Path) -> None:
    path = recipes / "smith" / "findings.toml"
    path.write_text(path.read_text().replace('worse = "1-plain"', 'worse = "1-plane"'))
    with pytest.raises(MinbertError, match=r'findings.toml: no row "1-plane" \(did you mean "1-plain"\?\)'):
        find_papers(recipes)
    path.write_text('best = "2-mean"')
    with pytest.raises(MinbertError, match=r"findings.toml: no title; expected it"):
        find_papers(recipes)
    with pytest.raises(MinbertError, match=r"no recipes of papers"):
        find_papers(recipes / "smith")


def test_a_setting_of_a_task_is_for_rows_that_have_it(
    papers: dict[str, Paper], recipes: Path, settings: Settings
) -> None:
    (recipes / "afterwards" / "one.toml").write_text(
        '[paper]\nrow = "One"\n[tasks.sst]\ntrain = "a.tsv"\ndev = "a.tsv"\n'
    )
    changed = replace(settings, sets=("tasks.sts.weight=2", "optimizer.lr=1e-4"))
    (one,), (mean,) = (jobs_of(papers, row) for row in ("afterwards/one", "smith/2-mean"))
    assert one.sets(changed) == ["optimizer.lr=1e-4"]
    assert [task.name for task in one.recipe(changed).tasks] == ["sst"]
    assert mean.recipe(changed).task("sts").weight == 2.0
    run_jobs([one], changed, Listener())
    assert json.loads(one.result(changed).read_text())["reproduction"]["set"] == ["optimizer.lr=1e-4"]
    assert is_done(one, changed)


@pytest.mark.parametrize("setting", ["tasks=3", "tasks", " tasks = 3"])
def test_a_setting_of_all_tasks_is_refused(papers: dict[str, Paper], settings: Settings, setting: str) -> None:
    (job,) = jobs_of(papers, "smith/2-mean")
    with pytest.raises(MinbertError) as found:
        run_jobs([job], replace(settings, sets=(setting,)), Listener())
    assert str(found.value) == f"--set {setting}: expected a task and its setting, such as tasks.sst.weight=2"


def test_a_result_of_another_recipe_does_not_count(papers: dict[str, Paper], recipes: Path, settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/2-mean")
    run_jobs([job], settings, Listener())
    assert is_done(job, settings)
    for aside in ("train_sample=7", "checkpoint_every=1", "keep=1", "log_every=3"):  # change no score on dev
        assert is_done(job, replace(settings, sets=(f"training.{aside}",)))
    assert not is_done(job, replace(settings, steps_cap=3))
    assert not is_done(job, replace(settings, sets=("training.epochs=3",)))
    path = recipes / "smith" / "2-mean.toml"
    path.write_text('about = "said better"\n' + path.read_text().replace("A guess.", "A misprint."))
    assert is_done(job, settings)  # what is told of a row changes no run
    path.write_text(path.read_text().replace('pooling = "mean"', 'pooling = "max"'))
    assert not is_done(job, settings)
    job.result(settings).write_text("{")
    assert not is_done(job, settings)


def test_a_result_that_was_made_otherwise_stays_unless_it_may_be_replaced(
    papers: dict[str, Paper], recipes: Path, settings: Settings
) -> None:
    careful = replace(settings, replace=False)
    jobs = jobs_of(papers, "smith/1-plain", "smith/2-mean")
    run_jobs([job for job in jobs if job.row.name == "2-mean"], careful, Listener())
    changed = replace(careful, sets=("training.epochs=3",))
    run_jobs(jobs, changed, first := Listener())
    assert first.done == ["1-plain:1"], "only what has no result at all"
    assert [made_otherwise(job, changed) for job in jobs] == [["training.epochs: 3, was 2"], []]
    run_jobs(jobs, replace(changed, replace=True), second := Listener())
    assert second.done == ["2-mean:1"]
    assert [made_otherwise(job, changed) for job in jobs] == [[], []]


def test_a_result_from_other_files_does_not_count(
    papers: dict[str, Paper], settings: Settings, small_data: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(small_data, tmp_path / "data"))
    (job,) = jobs_of(papers, "smith/1-plain")
    run_jobs([job], settings, Listener())
    written(job, settings, data=notes_of(data, sst="sentiment", sts="similarity"))
    here = replace(settings, data=str(data))
    assert is_done(job, here)
    path = data / "similarity-dev.tsv"
    path.write_text(path.read_text() + "\n")
    assert made_otherwise(job, here) == ["similarity-dev.tsv is another file"]
    shutil.rmtree(data)
    assert is_done(job, here), "files that are not there cannot be asked"


def test_a_result_of_another_kind_of_head_does_not_count(papers: dict[str, Paper], settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/1-plain")
    run_jobs([job], settings, Listener())
    sets = ("tasks.sts.head=dpha", "model.common_layer=true")
    written(job, settings, recipe=as_dict(job.recipe(replace(settings, encoder="tiny", sets=sets))))
    now = replace(settings, sets=sets)
    assert made_otherwise(job, now) == ["dpha: revision 2, was 1", "common layer: revision 2, was 1"]
    written(job, settings, revisions={"dpha": 2, "common layer": 1})
    assert made_otherwise(job, now) == ["common layer: revision 2, was 1"]
    written(job, settings, revisions=revisions(job.recipe(now)))
    assert is_done(job, now)


def test_a_result_whose_stage_read_other_files_does_not_count(
    papers: dict[str, Paper], settings: Settings, small_data: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(small_data, tmp_path / "data"))
    here = replace(settings, data=str(data))
    (job,) = jobs_of(papers, "smith/1-plain")
    job.row.path.write_text(job.row.path.read_text() + STAGE)
    run_jobs([job], settings, Listener())
    steps = {"first": {"steps": 3, "data": notes_of(data, sst="sentiment")}}
    written(job, settings, data=notes_of(data, sst="sentiment", sts="similarity"), stages=steps)
    assert made_otherwise(job, here) == []
    job.row.path.write_text(job.row.path.read_text().replace("[[stages]]", '[[stages]]\nabout = "said better"'))
    assert made_otherwise(job, here) == []
    steps["first"]["data"] = notes_of(data, sst="similarity")
    written(job, settings, stages=steps)
    assert made_otherwise(job, here) == ["sentiment-train.tsv is another file", "sentiment-dev.tsv is another file"]


def test_a_run_from_other_files_or_of_another_head_begins_anew(
    papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, small_data: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(small_data, tmp_path / "data"))
    real = real_settings(settings, tiny_encoder, data, "tasks.sts.head=ph")
    (job,) = jobs_of(papers, "smith/1-plain")
    assert run_jobs([job], real, Listener()).done == [job]
    before = json.loads(job.result(real).read_text())
    assert before["revisions"] == {"ph": 2} and begun_otherwise(job, real) == []
    path = data / "similarity-dev.tsv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:9]))
    assert begun_otherwise(job, real) == ["similarity-dev.tsv is another file"]
    outcome = run_jobs([job], real, listener := Listener())
    assert (outcome.done, listener.why) == ([job], [])
    assert json.loads(job.result(real).read_text())["data"]["dev"]["sts"]["rows"] == 8
    begun = job.folder(real) / "begun.json"
    begun.write_text(begun.read_text().replace(weights_digest(tiny_encoder), "another"))
    assert begun_otherwise(job, real) == ["another encoder is called tiny now"]
    begun.unlink()  # as a run of before there were any
    assert begun_otherwise(job, real) == ["ph: revision 2, was 1"]
    (job.folder(real) / "recipe.toml").write_text("shape = 3\n")
    (why,) = begun_otherwise(job, real) or []
    assert "recipe.toml: no tasks" in why, "of a version whose recipes said other things"


def test_what_is_half_done_is_not_begun_anew_unless_asked_to(
    papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, small_data: Path
) -> None:
    sets = ("training.batch_size=1", "training.log_every=1", "tasks.sst.fraction=100")
    real = replace(real_settings(settings, tiny_encoder, small_data, *sets), replace=False)
    (job,) = jobs_of(papers, "smith/1-plain")
    assert run_jobs([job], real, Impatient(1)).stopped == [job]
    check_ready([job], real)
    other = replace(real, sets=(*real.sets, "optimizer.lr=1e-4"))
    with pytest.raises(MinbertError, match=r"begun otherwise has trained \(optimizer\.lr: 0\.0001, was .*--replace"):
        check_ready([job], other)
    check_ready([job], replace(other, replace=True))
    check_ready([job], replace(other, runs=real.runs / "other"))


@pytest.mark.parametrize(
    "left",
    [
        "checkpoints/step-00000003",
        "model",
        "stages/1-first/checkpoints/step-00000003",
        "stages/1-first/model",
        "runs/1001/checkpoints/step-00000003",
        "runs/1001/models/step-00000003",
    ],
)
def test_what_a_run_leaves_that_another_would_lose(
    left: str, papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, small_data: Path
) -> None:
    """Its own, of a stage, or of an ensemble's run; "half done" or kept with --keep-models."""
    (job,) = jobs_of(papers, "smith/1-plain")
    job.row.path.write_text(job.row.path.read_text() + STAGE)
    real = replace(real_settings(settings, tiny_encoder, small_data), replace=False)
    job.folder(real).mkdir(parents=True)
    write_started(job.folder(real), job.recipe(real), "the weights of another")
    check_ready([job], real)
    (job.folder(real) / left).mkdir(parents=True)
    with pytest.raises(MinbertError, match=r"another encoder is called tiny now.*--replace"):
        check_ready([job], real)
    check_ready([job], replace(real, replace=True))


def test_a_recipe_that_is_written_anew_while_it_is_run_is_not_what_was_run(
    papers: dict[str, Paper], settings: Settings
) -> None:
    (job,) = jobs_of(papers, "smith/3-other")
    script = Path(settings.trainer[1])
    editing = script.with_name("editing.py")
    editing.write_text(script.read_text() + 'recipe.write_text(recipe.read_text().replace("1e-4", "1e-3"))\n')
    run_jobs([job], replace(settings, trainer=(sys.executable, str(editing))), Listener())
    assert json.loads(job.result(settings).read_text())["recipe"]["optimizer"]["lr"] == 1e-4
    assert made_otherwise(job, settings) == ["optimizer.lr: 0.001, was 0.0001"]


def test_a_setting_of_a_stage_is_for_rows_that_have_it(papers: dict[str, Paper], settings: Settings) -> None:
    one, other = jobs_of(papers, "smith/1-plain", "smith/3-other")
    one.row.path.write_text(one.row.path.read_text() + STAGE)
    changed = replace(settings, sets=("stages.first.optimizer.lr=1e-4",))
    check_sets([one.row, other.row], changed.sets)
    assert other.sets(changed) == []
    assert one.recipe(changed).stages[0].optimizer.lr == 1e-4
    with pytest.raises(
        MinbertError, match=r'has stages\.frist \(did you mean "stages\.first"\?\); expected one of: stages'
    ):
        check_sets([one.row, other.row], ["stages.frist.optimizer.lr=1e-4"])
    with pytest.raises(MinbertError, match=r"expected a stage and its setting, such as stages\.simcse\.optimizer\.lr"):
        check_sets([one.row], ["stages=1"])
    with pytest.raises(MinbertError, match=r"max_steps=5: expected --steps-cap instead"):
        check_sets([one.row], ["stages.first.training.max_steps=5"])
    with pytest.raises(MinbertError, match=r"is what a row is called"):
        check_sets([one.row], ["stages.first.name=x"])


def test_a_run_that_no_cap_shortened_is_a_whole_one(papers: dict[str, Paper], settings: Settings) -> None:
    (job,) = jobs_of(papers, "smith/1-plain")
    capped = replace(settings, steps_cap=20)
    run_jobs([job], capped, Listener())
    assert not is_done(job, settings), "6 of 12 steps"
    written(job, capped, planned_steps=12)
    assert is_done(job, settings) and is_done(job, capped)
    assert is_done(job, replace(settings, steps_cap=12))
    assert not is_done(job, replace(settings, steps_cap=11)), "that one would be shorter"
    assert not is_done(job, replace(settings, sets=("training.epochs=3",)))


def test_a_stage_that_a_cap_shortened_is_not_whole() -> None:
    stages = [{"name": "first", "training": {"max_steps": 20}}]
    results: dict[str, Any] = {"planned_steps": 12, "whole_steps": 12, "recipe": {"stages": stages}}
    assert not was_cut({**results, "stages": {"first": {"steps": 19}}})
    assert was_cut({**results, "stages": {"first": {"steps": 20}}})
    assert longest_part({**results, "stages": {"first": {"steps": 19}}}) == 19
    assert longest_part({**results, "whole_steps": 60, "recipe": {"ensemble": {"runs": 2}}}) == 30


NOT_READY: dict[str, tuple[dict[str, Any], str]] = {
    "no encoder": ({"encoder": "no-such"}, 'no encoder "no-such"; expected a folder, a hub id or one of: '),
    "no weights": ({"encoder": "EMPTY"}, "no model.safetensors"),
    "no data": ({"data": "nowhere"}, "no file nowhere/sentiment-train.tsv; say where the data is with --data DIR"),
    "no device": ({"device": "tpu9"}, 'device is "tpu9"; expected auto, cpu, cuda or cuda:N'),
    "no task": ({"set": "tasks=3"}, "--set tasks=3: expected a task and its setting, such as tasks.sst.weight=2"),
    "no row's task": (
        {"set": "tasks.stz.weight=2"},
        '--set tasks.stz.weight=2: none of these rows has tasks.stz (did you mean "tasks.sts"?); expected one of: tasks.sst, tasks.sts',
    ),
    "an option": (
        {"set": "model.encoder=mpnet"},
        "--set model.encoder=mpnet: expected --encoder instead, which is recorded with each result",
    ),
    "a row's name": (
        {"set": "name=x"},
        "--set name=x: is what a row is called; expected something that it trains with",
    ),
    "a file for a folder": (
        {"runs": "taken"},
        "taken: cannot be written (File exists); expected a folder to write into",
    ),
    "a result that is none": (
        {"results": "damaged"},
        "seed9.json: no dev, overall.2023, overall.2024, data, recipe, seconds, environment.device_name, environment.commit",
    ),
}


@pytest.mark.parametrize("mistake", NOT_READY)
def test_what_would_stop_every_run_is_said_once_and_before_any(
    mistake: str,
    recipes: Path,
    tmp_path: Path,
    tiny_encoder: Path,
    small_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = Path(shutil.copytree(tiny_encoder, tmp_path / "empty"))
    (empty / "model.safetensors").unlink()
    wrong, message = NOT_READY[mistake]
    given = {"encoder": tiny_encoder, "data": small_data, "device": "cpu", **wrong}
    given |= {"encoder": empty} if wrong.get("encoder") == "EMPTY" else {}
    (tmp_path / "taken").touch()
    damaged = tmp_path / "damaged" / "tiny" / "smith" / "3-other" / "seed9.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{}")
    places = {name: tmp_path / name for name in ("results", "runs", "page")}
    options = [word for key, value in {"recipes": recipes, **places, **given}.items() for word in (f"--{key}", value)]

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minbert", "reproduce", "smith", *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("error: ") and message in said.err
    assert not any(place.exists() for name, place in places.items() if name not in wrong), "neither a run nor a page"


def test_what_a_stage_needs_and_what_a_task_borrows_is_looked_for(
    papers: dict[str, Paper], recipes: Path, settings: Settings, tiny_encoder: Path, small_data: Path
) -> None:
    real = replace(settings, encoder=str(tiny_encoder), data=str(small_data), device="cpu")
    (job,) = jobs_of(papers, "smith/1-plain")
    check_ready([job], real)
    row = job.row.path.read_text()
    job.row.path.write_text(row + '[[stages]]\n[stages.tasks.sst]\ntrain = "first.tsv"\ndev = "sentiment-dev.tsv"\n')
    with pytest.raises(MinbertError, match=r"no file .*first\.tsv"):
        check_ready([job], real)
    job.row.path.write_text(row + '[tasks.sts.borrow]\ntask = "quora"\nlow = 5\nhigh = 5\n')
    with pytest.raises(MinbertError, match=r"no file .*quora"):
        check_ready([job], real)


def test_a_package_that_pooling_needs_is_looked_for(
    papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = replace(settings, encoder=str(tiny_encoder), data=str(small_data), device="cpu")
    (job,) = jobs_of(papers, "smith/1-plain")
    weighted = replace(real, sets=("tasks.sts.pooling=weighted", "model.pooling_weights={verb=2}"))
    check_ready([job], weighted)
    monkeypatch.setitem(sys.modules, "textblob", None)
    check_ready([job], real)
    with pytest.raises(MinbertError, match=r'pooling "weighted" needs textblob'):
        check_ready([job], weighted)


def test_what_would_keep_the_page_from_being_written_is_said_before_any_run(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_page(tmp_path / "docs" / "page.md")
    with pytest.raises(MinbertError, match=r"docs: is a folder; expected a file for the page, such as .*docs/page.md"):
        check_page(tmp_path / "docs")
    (tmp_path / "file").touch()
    with pytest.raises(MinbertError, match=r"file: cannot be written \(.*\); expected a folder to write into"):
        check_page(tmp_path / "file" / "page.md")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"needs matplotlib.*minbert\[report\]"):
        check_page(tmp_path / "docs" / "page.md")


def test_nothing_is_needed_for_what_is_done(papers: dict[str, Paper], settings: Settings) -> None:
    jobs = jobs_of(papers, "smith")
    run_jobs(jobs, settings, Listener())
    check_ready(jobs, settings)  # its encoder and its data are nowhere


def test_another_encoder_of_the_same_name_does_not_count(
    papers: dict[str, Paper], settings: Settings, tiny_encoder: Path, tmp_path: Path
) -> None:
    """Its own copy does, in half precision too, and so does a result of before results said it."""
    place = tmp_path / "home" / "tiny"
    shutil.copytree(tiny_encoder, place)
    here = replace(settings, encoder=str(place))
    job, other = jobs_of(papers, "smith/1-plain", "smith/2-mean")
    run_jobs([job, other], here, Listener())
    assert is_done(job, here)
    written(job, here, encoder_weights=weights_digest(place))
    assert is_done(job, here)
    tensors = load_file(place / "model.safetensors")
    save_file({name: value.half() for name, value in tensors.items()}, place / "model.safetensors")
    assert is_done(job, replace(here)), "settings remember what they have read"
    tensors["embeddings.word_embeddings.weight"] *= 1.5
    save_file(tensors, place / "model.safetensors")
    assert made_otherwise(job, replace(here)) == ["another encoder is called tiny now"]
    assert is_done(job, replace(here, encoder="elsewhere/tiny")), "one that is not there cannot be asked"
    written(other, here, encoder_weights=weights_digest(place))
    page = build_page(papers, load_results(papers, here.results), tmp_path)
    assert "| tiny | 2 of 4 | 2 | 0 | 0 | 0 | 2 |" in page


def test_an_ensemble_of_other_seeds_does_not_count(
    papers: dict[str, Paper], settings: Settings, tmp_path: Path
) -> None:
    (job,) = jobs_of(papers, "smith/2-mean")
    of_two = replace(settings, sets=("ensemble.runs=2", "ensemble.models=3"))
    run_jobs([job], of_two, Listener())
    written(job, of_two, members=[{"seed": 1001}, {"seed": 1}, {"seed": 1}])
    assert is_done(job, of_two)
    assert "seeds of the ensemble" not in build_page(papers, load_results(papers, settings.results), tmp_path)
    written(job, of_two, members=[{"seed": 1}] * 3)
    assert is_done(job, of_two), "the best three may be of one run"
    written(job, of_two, members=[{"seed": 1}, {"seed": 2}, {"seed": 2}])
    told = "seeds of the ensemble's runs: 1, 1001, was 1, 2"
    assert made_otherwise(job, of_two) == [told]
    assert f"`2-mean`, {told}." in build_page(papers, load_results(papers, settings.results), tmp_path)
