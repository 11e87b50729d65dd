"""An export where torch is not installed: a child process in which importing it fails does all that an export can do."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minbert.delivery.predictor import Predictor
from minbert.exporting import export
from minbert.model.answers import Decision
from minbert.model.saved import save_model
from tests.models import PAIRS, TEXTS, make

BLOCK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors", "onnx", "sklearn", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""

ASK = """
import json, pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from fastapi.testclient import TestClient

import minbert
from minbert.delivery.predictor import Predictor
from minbert.delivery.search import SearchIndex, SentenceEncoder
from minbert.delivery.server import app_of_environment

folder, index, told = sys.argv[1:4]
asked = json.loads(told)
texts, pairs = asked["texts"], asked["pairs"]
predictor = minbert.load(folder)
again = pickle.loads(pickle.dumps(Predictor.load(folder)))
with ThreadPoolExecutor(4) as threads:
    many = list(threads.map(lambda _: predictor.predict(texts, pairs), range(8)))
with TestClient(app_of_environment()) as client:
    served = client.post("/v1/predict", json={"texts": texts, "pairs": list(zip(texts, pairs))}).json()
    together = client.post("/v1/embed", json={"texts": texts}).json()["embeddings"]
    alone = [client.post("/v1/embed", json={"texts": [text]}).json()["embeddings"][0] for text in texts]
    nearest = client.post("/v1/search", json={"texts": texts[:1], "count": 3}).json()
    words = client.post("/v1/importance", json={"text": texts[0]}).json()
    card = client.get("/v1/model").json()
encoder = SentenceEncoder.load(folder)
found = SearchIndex.load(index).query(texts[:1], 3, encoder=encoder)[0]
own = SearchIndex.build(__import__("pathlib").Path(index).with_name("own"), texts, encoder)
scores = {name: one.score for name, one in minbert.evaluate(folder).items()}
print(json.dumps({
    "predicted": many[0],
    "same": all(one == many[0] for one in many) and again.predict(texts, pairs) == many[0],
    "vectors": predictor.embed(texts).tolist(),
    "served": served,
    "together": together,
    "alone": alone,
    "nearest": nearest,
    "words": words,
    "card": card,
    "found": [[match.row, match.score] for match in found],
    "first": own.query(texts[1:2], 1)[0][0].row,
    "scores": scores,
    "torch": sorted(name for name in sys.modules if name.split(".")[0] == "torch"),
}))
"""


def child(code: str, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", BLOCK + code, *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        env=os.environ | environment,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Path:
    """A model folder whose tasks read a text, a pair as one input, and two texts."""
    tasks = {
        "sentiment": {"like": "sst", "dev": "sentiment-dev.tsv", "train": "sentiment-train.tsv"},
        "paraphrase": {"like": "quora", "dev": "paraphrase-dev.tsv", "train": "paraphrase-train.tsv"},
        "similarity": {"like": "sts", "dev": "similarity-dev.tsv", "train": "similarity-train.tsv", "head": "cosine"},
    }
    tokenizer, built, manifest = make(tiny_encoder, tasks, pooling="mean")
    folder = tmp_path_factory.mktemp("run") / "model"
    decisions = {"sentiment": Decision(1.7), "paraphrase": Decision(0.6, 0.4)}
    save_model(folder, built, tokenizer, replace(manifest, data="embedded", decisions=decisions))
    return folder


@pytest.fixture(scope="module")
def exports(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("exports")
    for form in ("onnx", "onnx-int8"):
        export(model, to=form, out=place / form, tolerance=1.0)
    return {form: place / form for form in ("onnx", "onnx-int8")}


@pytest.mark.parametrize("form", ["onnx", "onnx-int8"])
def test_everything_that_an_export_can_do(model: Path, exports: dict[str, Path], tmp_path: Path, form: str) -> None:
    from minbert.delivery.search import SearchIndex, SentenceEncoder
    from minbert.delivery.server import ServeSettings
    from minbert.evaluating import evaluate_model

    # Built by the model, asked by its export.
    index = SearchIndex.build(tmp_path / "index", PAIRS, SentenceEncoder.load(model))
    settings = ServeSettings(exports[form], index=tmp_path / "index")
    serving = json.dumps(asdict(settings) | {"drain": None}, default=str)
    told = json.dumps({"texts": TEXTS, "pairs": PAIRS})
    done = child(ASK, str(exports[form]), str(tmp_path / "index"), told, MINBERT_SERVE=serving)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["torch"] == [] and found["same"]
    near = 1e-4 if form == "onnx" else 0.2
    own = Predictor.load(model)
    for name, rows in own.predict(TEXTS, PAIRS).items():
        for row, expected in zip(found["predicted"][name], rows, strict=True):
            if "score" in row:
                assert row["score"] == pytest.approx(expected["score"], abs=near)
            else:
                assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=near)
                assert form != "onnx" or row["label"] == expected["label"]
    for name, rows in found["predicted"].items():
        served = found["served"]["texts" if name == "sentiment" else "pairs"]
        for row, expected in zip(served, rows, strict=True):
            if "score" in expected:
                assert row[name]["score"] == pytest.approx(expected["score"], abs=near)
            else:
                assert row[name]["probabilities"] == pytest.approx(expected["probabilities"], abs=near)
    np.testing.assert_allclose(found["vectors"], own.embed(TEXTS), atol=1e-4 if form == "onnx" else 0.5)
    if form == "onnx":
        np.testing.assert_allclose(found["together"], found["alone"], atol=1e-5)
    else:
        assert found["together"] == found["alone"]
    expected = index.query(TEXTS[:1], 3)[0]
    assert found["found"][0][0] == found["nearest"]["matches"][0][0]["row"] == expected[0].row
    assert found["card"]["index"]["sentences"] == len(PAIRS) and "sentiment" in found["words"]["tasks"]
    np.testing.assert_allclose([score for _, score in found["found"]], [m.score for m in expected], atol=near)
    assert found["first"] == 2  # a sentence finds itself
    if form == "onnx":
        scores = {name: one.score for name, one in evaluate_model(model, device="cpu").items()}
        assert found["scores"] == pytest.approx(scores, abs=1e-5)


def test_the_commands(exports: dict[str, Path], tmp_path: Path) -> None:
    run = "from minbert.cli import main\nmain()"
    (tmp_path / "rows.csv").write_text("sentence\nA nice bonus.\n", encoding="utf-8")
    (tmp_path / "lines.txt").write_text("nice\nThe sun\n", encoding="utf-8")
    folder, index = str(exports["onnx-int8"]), str(tmp_path / "index")
    rows = child(run, "predict", folder, "--input", str(tmp_path / "rows.csv"), "--task", "sentiment")
    assert rows.returncode == 0, rows.stderr
    assert "sentiment" in json.loads(rows.stdout)
    tried = child(run, "try", folder, stdin="nice | a bonus\n")
    assert tried.returncode == 0 and "similarity" in tried.stdout, tried.stderr
    built = child(run, "search", "build", str(tmp_path / "lines.txt"), "--model", folder, "--out", index)
    assert built.returncode == 0, built.stderr
    queried = child(run, "search", "query", index, "nice", "--count", "1")
    assert queried.returncode == 0, queried.stderr
    assert json.loads(queried.stdout.splitlines()[0])["text"] == "nice"
    embedded = child(run, "embed", "nice", "--encoder", folder)
    assert embedded.returncode == 0, embedded.stderr
    assert len(json.loads(embedded.stdout)["vector"]) == 32
    scored = child(run, "evaluate", folder)
    assert scored.returncode == 0 and "overall" in scored.stdout, scored.stderr


def test_a_model_folder_says_what_it_needs(model: Path) -> None:
    run = "from minbert.cli import main\nmain()"
    for command in (["predict", str(model)], ["try", str(model)], ["serve", str(model)], ["evaluate", str(model)]):
        done = child(run, *command)
        assert done.returncode == 2
        assert "pip install 'minbert[train]'" in done.stderr
    done = child(f"import minbert\nminbert.load({str(model)!r})")
    assert "a model that is not exported to onnx needs torch" in done.stderr
