"""Exports: the same answers as the model's own, in onnxruntime, torch and the real libraries; refused where they are not."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from typer.testing import CliRunner

import minbert
from minbert import exporting
from minbert.cli import app
from minbert.delivery import onnx_heads
from minbert.delivery.card import Card, render
from minbert.delivery.export import compare, export_model
from minbert.delivery.exported import OnnxModel, read_export
from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError, MissingExtraError
from minbert.exporting import check_losses, export
from minbert.model.answers import Decision
from minbert.model.encoder import Encoder, EncoderConfig
from minbert.model.multitask import MultitaskModel
from minbert.model.pretrained import load_folder, save_encoder
from minbert.model.saved import save_ensemble, save_model
from minbert.tasks import HEADS
from tests.models import PAIRS, TEXTS, make

ROOT = Path(__file__).parent.parent
ROWS = list(zip(TEXTS, PAIRS, strict=True))
PAIRED = {"text": "a", "text2": "b", "train": "a.tsv"}
EVERY: dict[str, dict[str, Any]] = {
    "sst": {},
    "mlp": {"kind": "classification", "classes": ["no", "yes"], "train": "a.tsv", "head": "mlp", "loss": "bce"},
    "score": {"kind": "regression", "train": "a.tsv", "loss": "bce-threshold"},
    **{
        f"pair-{head}": {"kind": "pair-regression", **PAIRED, "head": head, "pooling": pooling}
        for head, pooling in zip(
            [name for name, row in HEADS.items() if not row.only_contrastive],
            ["cls", "mean", "max", "pooler"] * 4,
            strict=False,
        )
    },
    "together": {"kind": "contrastive", "text": "a", "train": "a.tsv", "head": "simcse"},
    "embedding": {"kind": "regression", "train": "a.tsv"},
    "hidden": {"kind": "masked", "train": "a.tsv", "text": "a"},
}
"""A task for every head, in every pooling, and one that is named as an output is."""


def predictor_of(encoder: Path, tasks: Mapping[str, Any], **model: Any) -> Predictor:
    tokenizer, built, manifest = make(encoder, tasks, **model)
    decisions = {"sst": Decision(1.7), "quora": Decision(0.6, 0.4)}
    known = {name: decision for name, decision in decisions.items() if name in tasks}
    return Predictor(built, tokenizer, replace(manifest, decisions=known))


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MPNet in miniature: relative bias, no segments, positions from 2 on."""
    special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    words = sorted({word.strip(".,?").lower() for text in (*TEXTS, *PAIRS) for word in text.split()})
    shape: dict[str, Any] = {"width": 16, "layers": 2, "heads": 4, "feed_forward": 24, "positions": 80}
    config = EncoderConfig(
        vocab_size=len(special + words), kind="mpnet", segments=0, pad_id=1, relative_buckets=32, **shape
    )
    folder = tmp_path_factory.mktemp("encoders") / "mpnet"
    save_encoder(Encoder(config, generator=torch.Generator().manual_seed(0)), folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in special + words), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Path:
    """A model folder of the embedded sample's tasks, one of which compares two texts."""
    folder = tmp_path_factory.mktemp("run") / "model"
    tasks = {
        "sentiment": {"like": "sst", "dev": "sentiment-dev.tsv", "train": "sentiment-train.tsv"},
        "paraphrase": {"like": "quora", "dev": "paraphrase-dev.tsv", "train": "paraphrase-train.tsv"},
        "similarity": {"like": "sts", "dev": "similarity-dev.tsv", "train": "similarity-train.tsv", "head": "cosine"},
    }
    tokenizer, model, manifest = make(tiny_encoder, tasks, pooling="mean")
    decisions = {"sentiment": Decision(1.7), "paraphrase": Decision(0.6, 0.4)}
    metric = {"value": 0.5, "low": 0.4, "high": 0.6}
    scores = {"dev": {"sentiment": {"rows": 80, "metric": "accuracy", "metrics": {"accuracy": metric}}}}
    save_model(folder, model, tokenizer, replace(manifest, data="embedded", decisions=decisions, scores=scores))
    (folder.parent / "recipe.toml").write_text('name = "tiny"\n', encoding="utf-8")
    return folder


def refusal(call: Any) -> str:
    with pytest.raises(MinbertError) as caught:
        call()
    return str(caught.value)


# --- one file with every head -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
@pytest.mark.parametrize("common", [False, True])
def test_every_head_and_pooling_equals_torch(
    tmp_path: Path, tiny_encoder: Path, mpnet: Path, kind: str, common: bool
) -> None:
    """The comparison is the export's own: another row of the same code would show nothing more."""
    encoder = tiny_encoder if kind == "bert" else mpnet
    predictor = predictor_of(
        encoder, EVERY, pooling="mean", common_layer=common, common_tasks=["sst", "pair-ph", "pair-dpha"][: 3 * common]
    )
    found = export_model(predictor, "onnx", tmp_path / "out", rows=ROWS)
    assert set(found.differences) == {*EVERY, "task_embedding"} - {"hidden"}
    assert max(found.differences.values()) < 1e-5
    onnx.checker.check_model(onnx.load(tmp_path / "out" / "model.onnx"))
    assert "hidden" in found.notes[0]
    manifest = read_export(tmp_path / "out")
    assert manifest["tasks"]["embedding"]["output"] == "task_embedding"
    assert manifest["tasks"]["pair-ph"]["reads"] == ["joint", "reversed"]
    assert manifest["tasks"]["together"]["reads"] == ["first", "second"]


def test_the_common_layer_is_in_the_file_once(tmp_path: Path, tiny_encoder: Path) -> None:
    """However many tasks, and branches of their heads, go through it."""
    predictor = predictor_of(tiny_encoder, EVERY, common_layer=True, common_tasks=["sst", "pair-ph", "pair-dpha"])
    export_model(predictor, "onnx", tmp_path / "out", rows=ROWS)
    layer = predictor.model.common[0].weight.detach().numpy().T
    stored = [numpy_helper.to_array(one) for one in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer]
    assert sum(one.shape == layer.shape and np.array_equal(one, layer) for one in stored) == 1


def test_vectors_of_an_earlier_run_are_answered_without_encoding(tmp_path: Path, tiny_encoder: Path) -> None:
    predictor = predictor_of(tiny_encoder, EVERY)
    export_model(predictor, "onnx", tmp_path / "out", rows=ROWS)
    model = OnnxModel(tmp_path / "out" / "model.onnx", read_export(tmp_path / "out"), threads=1)
    u, v = (predictor.embed(texts, pooling="mean") for texts in (TEXTS, PAIRS))
    mean = {name: task for name, task in model.manifest["tasks"].items() if task["pooling"] == "mean"}
    assert len(mean) == 3
    together = model.answer({name: [u, v][: len(task["reads"])] for name, task in mean.items()})
    for name, task in mean.items():
        views = [u, v][: len(task["reads"])]
        with torch.inference_mode():
            expected = predictor.model.answer(name, *map(torch.from_numpy, views)).numpy()
        np.testing.assert_allclose(model.answer({name: views})[name], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(together[name], expected, rtol=1e-5, atol=1e-5)
    many = {
        name: [np.tile(view, (1000, 1)) for view in views]
        for name, views in {"sst": [u], "pair-cosine": [u, v]}.items()
    }
    for name, outputs in model.answer(many).items():  # more rows than one run takes
        np.testing.assert_allclose(
            outputs[-5:], model.answer({name: [view[:5] for view in many[name]]})[name], atol=1e-5
        )
        assert len(outputs) == 1000 * len(TEXTS)


def test_a_file_that_is_off_is_refused(tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's bias moved by 0.001, in the graph alone."""
    monkeypatch.setitem(
        onnx_heads.HEADS,
        "linear",
        lambda head, u: head.add("Add", head.linear("out", u), head.constant(np.float32(0.001))),
    )
    predictor = predictor_of(tiny_encoder, {"sst": {}, "quora": {}})
    message = refusal(lambda: export_model(predictor, "onnx", tmp_path / "out", rows=ROWS))
    assert "sst differs from the model by 0.001" in message
    assert "not written" in message
    assert list(tmp_path.iterdir()) == []
    assert "sst differs" in refusal(lambda: export_model(predictor, "onnx-int8", tmp_path / "out", rows=ROWS))


def test_differences_are_in_proportion_where_numbers_are_large_and_nan_is_none() -> None:
    large, small = np.array([[1000.0]], np.float32), np.array([[0.5]], np.float32)
    assert compare({"a": large + 0.05}, {"a": large}, Path("out"))["a"] == pytest.approx(5e-5, rel=0.05)
    assert "differs" in refusal(lambda: compare({"a": small + 0.001}, {"a": small}, Path("out")))
    assert "differs" in refusal(lambda: compare({"a": small * np.nan}, {"a": small}, Path("out")))
    assert "(1, 1)" in refusal(lambda: compare({}, {"a": small}, Path("out")))


@pytest.mark.parity
def test_a_published_encoder(tmp_path: Path, minilm: Path) -> None:
    tasks = {"sst": {}, "sts": {"head": "cosine", "pooling": "mean"}, "quora": {"head": "dph"}}
    tokenizer, model, manifest = make(minilm, tasks)
    load_folder_into(model, minilm)
    found = export_model(Predictor(model, tokenizer, manifest), "onnx", tmp_path / "out", rows=ROWS)
    assert max(found.differences.values()) < 2e-5


def load_folder_into(model: MultitaskModel, folder: Path) -> None:
    """The published weights again, which `make` has shaken."""
    model.encoder.load_state_dict(load_folder(folder)[0].state_dict())


@pytest.mark.parametrize("second", [False, True])
def test_the_example_without_minbert(tmp_path: Path, saved: Path, second: bool) -> None:
    export(saved, to="onnx", out=tmp_path / "out")
    texts = [TEXTS[0], *([PAIRS[0]] if second else [])]
    code = f"import runpy, sys; sys.modules['minbert'] = sys.modules['torch'] = None; sys.argv = sys.argv[1:]; runpy.run_path({str(ROOT / 'examples' / 'onnx_alone.py')!r})"
    done = subprocess.run(
        [sys.executable, "-c", code, "onnx_alone.py", str(tmp_path / "out"), *texts], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    answers = minbert.predict(saved, texts[:1], texts[1:] or None)
    assert set(said) == ({"paraphrase", "similarity"} if second else {"sentiment"})
    if second:
        assert float(said["similarity"]) == pytest.approx(answers["similarity"][0]["score"], abs=1e-4)
    name = "paraphrase" if second else "sentiment"
    for label, share in answers[name][0]["probabilities"].items():
        assert f"'{label}': {share:.4f}"[:-1] in said[name]


def test_an_export_is_evaluated_as_the_model_is(tmp_path: Path, saved: Path) -> None:
    found = minbert.export(saved, to="onnx", out=tmp_path / "out")
    exported, own = minbert.evaluate(found.folder, device="cpu"), minbert.evaluate(saved, device="cpu")
    for name, evaluation in own.items():
        assert exported[name].score == pytest.approx(evaluation.score, abs=1e-5), name


def test_of_an_export_tasks_that_are_judged_by_answers_are_evaluated(
    tmp_path: Path, tiny_encoder: Path, small_data: Path
) -> None:
    tasks = {
        "sentiment": {"like": "sst", "dev": "sentiment-dev.tsv", "train": "sentiment-train.tsv"},
        "hidden": {"kind": "masked", "train": "sentiment-train.tsv", "dev": "sentiment-dev.tsv", "text": "text"},
        "alike": {"kind": "contrastive", "train": "paraphrase-train.tsv", "dev": "paraphrase-dev.tsv", "text": "text"},
    }
    export_model(predictor_of(tiny_encoder, tasks), "onnx", tmp_path / "out", rows=ROWS)
    with pytest.warns(UserWarning, match="hidden is a masked task|alike is a contrastive task") as warned:
        found = minbert.evaluate(tmp_path / "out", data=small_data)
    assert list(found) == ["sentiment"] and len(warned) == 2


def test_what_int8_costs_is_measured_on_dev(tmp_path: Path, saved: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(saved), "--to", "onnx-int8", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    losses = read_export(tmp_path / "out")["int8"]
    evaluated = minbert.evaluate(saved, device="cpu")
    for name, loss in losses.items():
        assert loss["rows"] == 80
        assert loss["fp32"] == pytest.approx(evaluated[name].score)
        assert loss["difference"] == pytest.approx(loss["int8"] - loss["fp32"])
        assert abs(loss["difference"]) < 0.1
        assert f"{loss['difference']:+.4f}" in done.output
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert (
        f"| similarity | 80 of 80 | pearson | {losses['similarity']['fp32']:.4f} | {losses['similarity']['int8']:.4f} |"
        in card
    )


def test_int8_is_measured_on_so_many_rows_as_asked(tmp_path: Path, saved: Path) -> None:
    found = export(saved, to="onnx-int8", out=tmp_path / "out", measured=12)
    assert {(loss["rows"], loss["of"]) for loss in found.losses.values()} == {(12, 80)}
    assert "| 12 of 80 |" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_int8_that_costs_too_much_is_refused_and_what_may_be_chance_is_warned_of(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose vectors are nothing but noise, of a model that is always right."""
    loss = {"metric": "accuracy", "rows": 200, "of": 900, "fp32": 0.9, "int8": 0.85, "difference": -0.05}
    for high, tolerance, warnings in ((0.01, 0.02, 1), (-0.01, 0.05, 0), (-0.01, 0.02, 1)):
        found = check_losses({"sst": {**loss, "low": -0.09, "high": high}}, tolerance)
        assert len(found) == warnings
    message = refusal(lambda: check_losses({"sst": {**loss, "low": -0.09, "high": -0.03}}, 0.02))
    assert "int8 costs sst 0.0500 of its accuracy on 200 dev rows (0.9000 to 0.8500" in message
    assert "expected at most 0.02: not written" in message
    undefined = {**loss, "int8": float("nan"), "difference": float("nan"), "low": float("nan"), "high": float("nan")}
    assert "not written" in refusal(lambda: check_losses({"sst": undefined}, 0.02))

    rng, encode, judge = np.random.default_rng(1), OnnxModel.encode, exporting.judge
    right = {name: evaluation.labels for name, evaluation in minbert.evaluate(saved, device="cpu").items()}

    def noise(model: OnnxModel, *given: Any, **more: Any) -> Any:
        return {how: rng.normal(size=found.shape).astype("f") for how, found in encode(model, *given, **more).items()}

    def judged(task: Any, outputs: Any, decision: Any) -> Any:
        """Of the model's own outputs, which come first, the labels themselves."""
        answers = judge(task, outputs, decision)
        return replace(answers, predictions=right.pop(task.name)) if task.name in right else answers

    monkeypatch.setattr(OnnxModel, "encode", noise)
    monkeypatch.setattr(exporting, "judge", judged)
    message = refusal(lambda: export(saved, to="onnx-int8", out=tmp_path / "out"))
    assert "int8 costs sentiment" in message
    assert list(tmp_path.iterdir()) == []


def test_a_predictor_runs_an_export(tmp_path: Path, tiny_encoder: Path, mpnet: Path) -> None:
    """The same answers, from a pickle too; each distinct text is encoded once."""
    for number, encoder in enumerate((tiny_encoder, mpnet)):
        own, folder = predictor_of(encoder, {**EVERY, "quora": {}}, pooling="mean"), tmp_path / str(number)
        export_model(own, "onnx", folder, rows=ROWS)
        for found in (minbert.load(folder), pickle.loads(pickle.dumps(Predictor.load(folder)))):
            assert found.max_tokens == own.max_tokens
            texts, pairs = [*TEXTS, "nice " * 90, "nice"], [*PAIRS, "a " * 90, "nice"]
            expected = own.outputs(texts, pairs)
            for name, outputs in found.outputs(texts, pairs).items():
                np.testing.assert_allclose(outputs, expected.pop(name), rtol=1e-4, atol=1e-4, err_msg=name)
            assert not expected
            np.testing.assert_allclose(found.embed(texts), own.embed(texts), atol=1e-4)
            answers, wanted = (one.predict(texts, pairs, tasks=["quora"])["quora"] for one in (found, own))
            assert [row["label"] for row in answers] == [row["label"] for row in wanted]
    assert "expected cpu" in refusal(lambda: Predictor.load(tmp_path / "0", backend="torch"))
    assert "an export already" in refusal(lambda: export(tmp_path / "0", to="torch", out=tmp_path / "again"))
    assert "holds no torch model" in refusal(lambda: Predictor.load(tmp_path / "0").model)
    manifest = read_export(tmp_path / "0")
    (tmp_path / "0" / "manifest.json").write_text(json.dumps(manifest | {"format": 1}), encoding="utf-8")
    assert "format 1; this minbert reads format 3: minbert export again" in refusal(
        lambda: minbert.load(tmp_path / "0")
    )
    (tmp_path / "0" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert "an export in fp32" in refusal(lambda: Predictor.load(tmp_path / "0", precision="int8"))


# --- what cannot be exported ------------------------------------------------------------------------------------------


def test_what_cannot_be_exported_is_said(tmp_path: Path, saved: Path, tiny_encoder: Path) -> None:
    assert "did you mean" in refusal(lambda: export(saved, to="onx", out=tmp_path / "out"))
    (tmp_path / "there").mkdir()
    assert "is there already" in refusal(lambda: export(saved, to="onnx", out=tmp_path / "there"))
    message = refusal(lambda: export(saved, to="onnx", out=tmp_path / "there", overwrite=True))
    assert "holds no export" in message
    tokenizer, model, manifest = make(tiny_encoder)
    save_ensemble(tmp_path / "both", [saved, saved], manifest)
    assert "members/1" in refusal(lambda: export(tmp_path / "both", to="onnx", out=tmp_path / "out"))
    weighted = Predictor(
        *(model, tokenizer), manifest=replace(manifest, model=replace(manifest.model, pooling="weighted"))
    )
    for form in ("onnx", "torch", "sentence-transformers"):
        message = refusal(lambda form=form: export_model(weighted, form, tmp_path / "out", rows=ROWS))
        assert 'pooling is "weighted"' in message


def test_a_missing_extra_says_the_command(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'minbert\[export\]'"):
        export(saved, to="onnx", out=tmp_path / "out")


# --- the folders of other libraries, and torch ------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["bert", "mpnet"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "pooler"])
def test_sentence_transformers_loads_it(
    tmp_path: Path, tiny_encoder: Path, mpnet: Path, kind: str, pooling: str
) -> None:
    from sentence_transformers import SentenceTransformer

    predictor = predictor_of(tiny_encoder if kind == "bert" else mpnet, {"sst": {}}, pooling=pooling)
    export_model(predictor, "sentence-transformers", tmp_path / "out", rows=ROWS)
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    texts = [*TEXTS, "nice " * 100]
    np.testing.assert_allclose(model.encode(texts), predictor.embed(texts), atol=1e-5)
    assert model.max_seq_length == 64


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_transformers_loads_it(tmp_path: Path, tiny_encoder: Path, mpnet: Path, kind: str) -> None:
    from transformers import AutoModel, AutoTokenizer

    predictor = predictor_of(tiny_encoder if kind == "bert" else mpnet, {"sst": {}})
    export_model(predictor, "transformers", tmp_path / "out", rows=ROWS)
    tokenizer, model = (loader.from_pretrained(tmp_path / "out") for loader in (AutoTokenizer, AutoModel))
    inputs = tokenizer(TEXTS, PAIRS, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        found = model.eval()(**inputs).last_hidden_state
        real = inputs["attention_mask"].bool()
        expected = predictor.model.encoder(inputs["input_ids"], real, inputs.get("token_type_ids"))
    np.testing.assert_allclose(found[real].numpy(), expected[real].numpy(), atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["bert", "mpnet"])
@pytest.mark.parametrize("model", [{"pooling": "pooler"}, {"pooling": "cls", "common_layer": True}])
def test_classifiers_of_transformers(
    tmp_path: Path, tiny_encoder: Path, mpnet: Path, kind: str, model: dict[str, Any]
) -> None:
    """Probabilities with the temperature in them, of one text and of two, and a score."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tasks: dict[str, Any] = {"sst": {}, "quora": {}, "sts": {}, "mlp": EVERY["mlp"]}
    predictor = predictor_of(tiny_encoder if kind == "bert" else mpnet, tasks, **model)
    found = export_model(predictor, "transformers", tmp_path / "out", rows=ROWS)
    assert sorted(path.name for path in (tmp_path / "out" / "classifiers").iterdir()) == ["quora", "sst", "sts"]
    assert [note for note in found.notes if "mlp" in note]
    answers = predictor.answers(TEXTS, PAIRS)
    for name in ("sst", "quora", "sts"):
        place = tmp_path / "out" / "classifiers" / name
        loaded, tokenizer = (
            AutoModelForSequenceClassification.from_pretrained(place),
            AutoTokenizer.from_pretrained(place),
        )
        columns = [TEXTS] if name == "sst" else [TEXTS, PAIRS]
        with torch.inference_mode():
            logits = loaded.eval()(**tokenizer(*columns, padding=True, truncation=True, return_tensors="pt")).logits
        if name == "sts":
            np.testing.assert_allclose(logits.numpy(), predictor.outputs(TEXTS, PAIRS, ["sts"])["sts"], atol=1e-5)
        else:
            assert list(loaded.config.id2label.values()) == list(predictor.tasks[name].classes)
            np.testing.assert_allclose(logits.softmax(-1).numpy(), answers[name].probabilities, atol=1e-5)


def test_a_head_without_a_layer_before_it_is_no_classifier_of_transformers(tmp_path: Path, tiny_encoder: Path) -> None:
    predictor = predictor_of(tiny_encoder, {"sst": {}}, pooling="mean")
    found = export_model(predictor, "transformers", tmp_path / "out", rows=ROWS)
    assert not (tmp_path / "out" / "classifiers").exists()
    assert "no AutoModelForSequenceClassification for sst" in found.notes[0]


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_the_program_of_torch_runs_without_minbert(tmp_path: Path, tiny_encoder: Path, mpnet: Path, kind: str) -> None:
    """In a process that cannot import minbert, at other sizes than it was recorded with, one row among them."""
    tasks = {name: EVERY[name] for name in ("sst", "pair-cosine", "pair-dpha", "together")}
    predictor = predictor_of(tiny_encoder if kind == "bert" else mpnet, tasks)
    found = export_model(predictor, "torch", tmp_path / "out", rows=ROWS)
    assert max(found.differences.values()) < 1e-5
    script = """
import sys
sys.modules["minbert"] = None
import torch
model = torch.export.load(sys.argv[1]).module()
for rows, tokens, pairs in ((1, 1, 0), (1, 9, 1), (7, 64, 20)):
    ids = torch.full((rows, tokens), 3)
    said = model(ids, torch.ones_like(ids), torch.zeros_like(ids), torch.zeros(pairs, 2, dtype=torch.long))
    print(tuple(said["sst"].shape), tuple(said["pair-cosine"].shape))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out" / "model.pt2")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(1, 5) (0, 1)", "(1, 5) (1, 1)", "(7, 5) (20, 1)"]


# --- the card ---------------------------------------------------------------------------------------------------------


def test_the_card_of_a_run(tmp_path: Path, saved: Path) -> None:
    minbert.export(saved.parent, to="onnx", out=tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlanguage: en\nlibrary_name: onnx\n")
    for line in (
        "# mine",
        "| sentiment | accuracy | 0.5000 | 0.4000 to 0.6000 | 80 |",
        'name = "tiny"',
        "English only",
    ):
        assert line in card
    assert "a sample written for this project" in card


def test_the_card_knows_the_terms_of_the_built_in_data(tiny_encoder: Path) -> None:
    *_, manifest = make(tiny_encoder, {"quora": {}, "sts": {"train": "mine.csv"}})
    card = render("onnx", replace(manifest, model=replace(manifest.model, encoder="minilm")), Card(), {}, [])
    assert "non-commercial research" in card
    assert "mine.csv" in card
    assert "CC BY-SA" not in card  # those are someone's own files
    assert "held Quora questions" in card
    assert "held Quora questions" not in render("onnx", manifest, Card(), {}, [])


def test_a_manifest_of_another_format_is_refused(tmp_path: Path, saved: Path) -> None:
    export(saved, to="onnx", out=tmp_path / "out")
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(content | {"format": 9}))
    assert "format 9" in refusal(lambda: read_export(tmp_path / "out"))
