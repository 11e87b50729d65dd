"""Model folders: what comes back is what was saved, transformers reads the encoder, and damage is told in a line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minbert import __version__
from minbert.data.inputs import tokenize
from minbert.data.raw import Examples
from minbert.data.tokenizer import Tokenizer
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError
from minbert.model import saved
from minbert.model.answers import Decision
from minbert.model.manifest import FORMAT, MANIFEST, read_manifest, update_manifest
from minbert.model.multitask import MultitaskModel, encode_pooled, outputs_of
from minbert.model.saved import load_model, save_model
from tests.models import PAIRS, TEXTS, make

TASKS: dict[str, dict[str, Any]] = {
    "sst": {"pooling": "mean", "class_weights": [1, 2, 1, 1, 1], "label_smoothing": 0.1},
    "quora": {"head": "dpha", "weight": 2.0},
    "sts": {"head": "projected-cosine", "loss": "cosine-mse", "hidden": 8},
    "überraschung": {"kind": "regression", "train": "a.tsv", "low": -1, "high": 1},
}


def say(model: MultitaskModel, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    found = {}
    for name, task in model.tasks.items():
        examples = Examples([], TEXTS, PAIRS if task.is_pair else None, None)
        found[name] = outputs_of(model, tokenize(task, examples, tokenizer, 64))
    return found


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(MinbertError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def original(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer, model, manifest = make(tiny_encoder, TASKS, common_layer=True, pooling="max", encoder_dropout=0.2)
    save_model(folder, model, tokenizer, replace(manifest, decisions=DECISIONS, scores=SCORES))
    return folder


DECISIONS = {"quora": Decision(temperature=1.5, threshold=0.4)}
SCORES = {"overall": {"2023": 0.5}, "dev": {"sst": 0.4}}


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(original, tmp_path / "model")


# --- there and back -------------------------------------------------------------------------------------------------


def test_a_model_comes_back_exactly(tiny_encoder: Path, tmp_path: Path) -> None:
    tokenizer, model, manifest = make(tiny_encoder, TASKS, common_layer=True, pooling="max")
    save_model(tmp_path / "model", model, tokenizer, manifest)
    loaded, its_tokenizer, its_manifest = load_model(tmp_path / "model")
    assert its_manifest == manifest
    assert not loaded.training
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    before, after = say(model, tokenizer), say(loaded, its_tokenizer)
    for name in TASKS:
        np.testing.assert_array_equal(before[name], after[name])


def test_a_common_layer_of_some_tasks_comes_back(tiny_encoder: Path, tmp_path: Path) -> None:
    """In every way that a model is run: the heads read what they were trained on."""
    tasks = {"sst": {}, "quora": {}, "sts": {"head": "cosine"}}
    tokenizer, model, manifest = make(tiny_encoder, tasks, common_layer=True, common_tasks=["quora", "sts"])
    save_model(tmp_path / "model", model, tokenizer, manifest)
    again, _, found = load_model(tmp_path / "model")
    assert found == manifest and again.common_tasks == {"quora", "sts"}
    expected = say(model, tokenizer)
    predicted = Predictor.load(tmp_path / "model").outputs(TEXTS, PAIRS)
    for name, outputs in say(again, tokenizer).items():
        assert np.array_equal(outputs, expected[name])
        np.testing.assert_allclose(predicted[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_model_without_any_weights_in_its_heads_comes_back(tiny_encoder: Path, tmp_path: Path) -> None:
    tokenizer, model, manifest = make(tiny_encoder, {"sts": {"head": "cosine"}})
    save_model(tmp_path / "model", model, tokenizer, manifest)
    loaded, its_tokenizer, _ = load_model(tmp_path / "model")
    np.testing.assert_array_equal(say(loaded, its_tokenizer)["sts"], say(model, tokenizer)["sts"])


def test_what_lies_in_the_folder(original: Path) -> None:
    files = {str(path.relative_to(original)) for path in original.rglob("*") if path.is_file()}
    assert {MANIFEST, "heads.safetensors", "encoder/config.json", "encoder/model.safetensors"} < files
    assert {"encoder/tokenizer.json", "encoder/tokenizer_config.json"} < files
    heads = load_file(original / "heads.safetensors")
    assert {name.split(".")[0] for name in heads} == {"heads", "common"}
    assert [path.name for path in original.parent.iterdir()] == ["model"]


def test_what_the_manifest_says(original: Path) -> None:
    content = json.loads((original / MANIFEST).read_text(encoding="utf-8"))
    assert content["format"] == FORMAT == 1
    assert content["version"] == __version__
    assert content["recipe"] == "tiny"
    assert list(content["tasks"]) == list(TASKS)
    assert content["tasks"]["sst"]["classes"] == ["very negative", "negative", "neutral", "positive", "very positive"]
    assert content["tasks"]["quora"]["classes"] == ["different", "duplicate"]
    assert (content["tasks"]["sts"]["low"], content["tasks"]["sts"]["high"]) == (0, 5)
    assert content["tasks"]["sst"]["pooling"] == "mean"
    assert content["model"]["pooling"] == "max"
    assert content["decisions"] == {"quora": {"temperature": 1.5, "threshold": 0.4}}
    assert content["scores"] == SCORES
    assert "überraschung" in (original / MANIFEST).read_text(encoding="utf-8")  # as a person reads it


def test_the_manifest_is_read_as_it_was_written(original: Path) -> None:
    manifest = read_manifest(original)
    assert manifest.decisions == DECISIONS
    assert manifest.scores == SCORES
    assert manifest.tasks[0].class_weights == (1, 2, 1, 1, 1)
    assert manifest.model.encoder_dropout == 0.2
    model, _, _ = load_model(original)
    assert model.encoder.config.dropout == 0.2


def test_decisions_are_added_without_touching_the_weights(folder: Path) -> None:
    weights = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
    manifest = read_manifest(folder)
    changed = replace(manifest, decisions={"sst": Decision(temperature=2.0)}, scores={"overall": 1})
    update_manifest(folder, changed)
    assert read_manifest(folder) == changed
    assert changed.tasks == manifest.tasks
    assert all(path.read_bytes() == content for path, content in weights.items())


@pytest.mark.parity
def test_transformers_loads_the_encoder(original: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer, _ = load_model(original)
    theirs = AutoModel.from_pretrained(original / "encoder").eval()
    given = AutoTokenizer.from_pretrained(original / "encoder")(TEXTS, PAIRS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**given)
    tokens = tokenizer.encode(TEXTS, PAIRS)
    for row in range(len(TEXTS)):
        assert given["input_ids"][row][given["attention_mask"][row] == 1].tolist() == tokens[row][0].tolist()
    found = encode_pooled(model.runner, tokens, ["cls", "pooler"])
    np.testing.assert_allclose(found["cls"], expected.last_hidden_state[:, 0], atol=1e-5)
    np.testing.assert_allclose(found["pooler"], expected.pooler_output, atol=1e-5)


def test_a_model_can_be_loaded_from_inside_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load_model(Path())[2] == read_manifest(folder)


# --- what is refused ------------------------------------------------------------------------------------------------


def change(folder: Path, **changes: Any) -> None:
    path = folder / MANIFEST
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}), encoding="utf-8")


def test_a_newer_format_says_how_to_get_a_newer_minbert(folder: Path) -> None:
    change(folder, format=FORMAT + 1)
    message = refusal(lambda: load_model(folder))
    assert f"format {FORMAT + 1}; this minbert reads format {FORMAT}: pip install -U minbert" in message
    assert MANIFEST in message


@pytest.mark.parametrize("found", [0, "one", None])
def test_an_unknown_format_says_how_to_make_a_model_anew(folder: Path, found: Any) -> None:
    change(folder, format=found)
    message = refusal(lambda: load_model(folder))
    assert f"format {found!r}; this minbert reads format {FORMAT}: minbert train RECIPE" in message


@pytest.mark.parametrize("before", [..., {"dpha": 2, "common layer": 1}])
def test_a_model_whose_common_layer_computed_otherwise_is_refused(folder: Path, before: Any) -> None:
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert content["revisions"] == {"dpha": 2, "common layer": 2}
    change(folder, revisions=before)
    message = refusal(lambda: load_model(folder))
    assert "a common layer behind dpha, as an earlier minbert had it; expected it before: minbert train" in message
    (dpha,) = [name for name, task in content["tasks"].items() if task["head"] == "dpha"]
    others = [name for name in content["tasks"] if name != dpha]
    for model in ({"common_layer": False, "common_tasks": []}, {"common_tasks": others}):
        change(folder, model=content["model"] | model)
        assert len(read_manifest(folder).tasks) == len(content["tasks"]), "what computes as it did is read as ever"


def test_no_such_folder(tmp_path: Path) -> None:
    message = refusal(lambda: load_model(tmp_path / "nowhere"))
    assert "nowhere/minbert.json: no such file; expected a model folder, such as RUN/model" in message
    assert "did you mean" not in message


def test_a_runs_folder_for_its_model(folder: Path) -> None:
    message = refusal(lambda: load_model(folder.parent))
    assert f"(did you mean {folder}?)" in message


def test_a_file_for_a_folder(folder: Path) -> None:
    assert "heads.safetensors" in refusal(lambda: load_model(folder / "heads.safetensors"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not readable JSON"),
        (b'{"format": 1, "tas', "not readable JSON"),
        (b"\xff\xfe", "not readable JSON"),
        (b"[1, 2]", "a list; expected an object"),
        (b'{"format": 1}', "no 'tasks'; expected"),
    ],
)
def test_a_damaged_manifest(folder: Path, content: bytes, expected: str) -> None:
    (folder / MANIFEST).write_bytes(content)
    message = refusal(lambda: load_model(folder))
    assert MANIFEST in message
    assert expected in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": ...}, "no 'model'"),
        ({"decisions": ...}, "no 'decisions'"),
        ({"decisions": []}, "expected what save_model writes"),
        ({"decisions": {"sst": {"warmth": 1}}}, "warmth"),
        ({"tasks": {}}, "no tasks"),
        ({"tasks": {"sst": {"hed": "linear"}}}, 'unknown key "hed" (did you mean "head"?)'),
        ({"tasks": {"sst": {"head": "ph"}}}, "reads two texts"),
    ],
)
def test_a_manifest_that_says_nonsense(folder: Path, changes: dict[str, Any], expected: str) -> None:
    change(folder, **changes)
    assert expected in refusal(lambda: load_model(folder))


def test_no_heads(folder: Path) -> None:
    (folder / "heads.safetensors").unlink()
    assert "heads.safetensors: missing or damaged" in refusal(lambda: load_model(folder))


@pytest.mark.parametrize("size", [0, 7, 200])
def test_heads_that_were_cut_off(folder: Path, size: int) -> None:
    path = folder / "heads.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "heads.safetensors: missing or damaged" in refusal(lambda: load_model(folder))


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["heads.sst.out.bias"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["heads.other.out.bias"] = torch.zeros(1)


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["heads.sst.out.bias"] = torch.zeros(7)


@pytest.mark.parametrize(
    ("spoil", "named"), [(drop, "heads.sst.out.bias"), (add, "heads.other.out.bias"), (widen, "heads.sst.out.bias")]
)
def test_heads_that_do_not_fit_the_tasks(folder: Path, spoil: Callable[[Any], None], named: str) -> None:
    tensors = load_file(folder / "heads.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "heads.safetensors")
    message = refusal(lambda: load_model(folder))
    assert f"heads.safetensors: {named} does not fit the tasks that {MANIFEST} lists" in message


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_an_encoder_that_is_not_whole(folder: Path, name: str) -> None:
    (folder / "encoder" / name).unlink()
    assert "encoder" in refusal(lambda: load_model(folder))


# --- replaced in one step -------------------------------------------------------------------------------------------


def test_a_new_model_replaces_the_old_one_whole(folder: Path, tiny_encoder: Path) -> None:
    (folder / "stale").write_text("of the old one")
    tokenizer, model, manifest = make(tiny_encoder, {"sst": {}}, seed=5)
    save_model(folder, model, tokenizer, manifest)
    assert read_manifest(folder).tasks == manifest.tasks
    assert not (folder / "stale").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_the_old_model(
    folder: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, model, manifest = make(tiny_encoder, {"sst": {}}, seed=5)
    before = read_manifest(folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_model(folder, model, tokenizer, manifest)
    assert load_model(folder)[2] == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_first_save_that_fails_leaves_nothing(
    tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, model, manifest = make(tiny_encoder, {"sst": {}})
    monkeypatch.setattr(saved, "to_json", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_model(tmp_path / "model", model, tokenizer, manifest)
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_replacement_was_interrupted_is_found(folder: Path) -> None:
    before = read_manifest(folder)
    folder.rename(folder.with_name(".model.previous"))
    folder.with_name(".model.part").mkdir()
    assert load_model(folder)[2] == before
    assert not folder.with_name(".model.previous").exists()


def test_the_rest_of_a_finished_replacement_is_removed(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name(".model.previous"))
    read_manifest(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
