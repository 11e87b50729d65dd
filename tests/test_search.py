"""Nearest sentences: the exact search against a plain sort, folders that are whole or absent, and no mixed-up models."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minbert.delivery.nearest import build_graph
from minbert.delivery.predictor import Predictor
from minbert.delivery.search import SearchIndex, SentenceEncoder, describe_model, nearest, read_sentences, unit
from minbert.errors import MinbertError, MissingExtraError
from minbert.exporting import export
from minbert.model.saved import save_model
from tests.models import PAIRS, TEXTS, make
from tests.test_cli_train import Command, minbert  # noqa: F401 - a fixture

SENTENCES = [*TEXTS, *PAIRS[:3]]


@pytest.fixture(scope="module")
def encoder(tiny_encoder: Path) -> SentenceEncoder:
    return SentenceEncoder.load(tiny_encoder)


@pytest.fixture(scope="module")
def index(encoder: SentenceEncoder, tmp_path_factory: pytest.TempPathFactory) -> SearchIndex:
    return SearchIndex.build(tmp_path_factory.mktemp("search") / "index", SENTENCES, encoder)


def refusal(call: Any, *given: Any, **more: Any) -> str:
    with pytest.raises(MinbertError) as caught:
        call(*given, **more)
    return str(caught.value)


# --- the search -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    rows=st.integers(1, 60),
    count=st.integers(1, 70),
    block=st.integers(1, 64),
    seed=st.integers(0, 99),
    grid=st.booleans(),
)
def test_blocks_find_what_a_plain_sort_finds(rows: int, count: int, block: int, seed: int, grid: bool) -> None:
    """On a grid of few values many products are equal, and exact whatever the order of their sums: ties too agree."""
    rng = np.random.default_rng(seed)
    draw = (lambda *shape: rng.integers(-1, 2, shape)) if grid else (lambda *shape: rng.normal(size=shape))
    vectors, asked = draw(rows, 5).astype(np.float32), draw(3, 5).astype(np.float32)
    count = min(count, rows)
    expected = np.argsort(-(asked.astype(float) @ vectors.astype(float).T), axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(nearest(vectors, asked, count, block=block), expected)


def test_more_questions_than_a_product_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minbert.delivery.nearest.QUESTIONS", 4)
    rng = np.random.default_rng(1)
    vectors, asked = (unit(rng.normal(size=(rows, 8)).astype(np.float32)) for rows in (30, 11))
    expected = np.argsort(-(asked @ vectors.T), axis=1)[:, :3]
    np.testing.assert_array_equal(nearest(vectors, asked, 3), expected)


def test_scores_are_the_cosines_of_the_model(index: SearchIndex, tiny_encoder: Path) -> None:
    from minbert.delivery.embedder import Embedder

    vectors = unit(Embedder.load(tiny_encoder).embed([*SENTENCES, "the sun and a lake"]))
    expected = vectors[:-1] @ vectors[-1]
    found = index.query(["the sun and a lake"], count=len(SENTENCES))[0]
    assert [match.row - 1 for match in found] == np.argsort(-expected).tolist()
    np.testing.assert_allclose([match.score for match in found], np.sort(expected)[::-1], atol=1e-5)


def test_a_sentence_of_the_index_finds_itself_first(index: SearchIndex) -> None:
    for row, matches in enumerate(index.query(SENTENCES, count=3), start=1):
        assert (matches[0].row, matches[0].text) == (row, SENTENCES[row - 1])
        assert matches[0].score == pytest.approx(1, abs=1e-6)
        assert len(matches) == 3


def test_fewer_sentences_than_asked_for_are_all_there_are(index: SearchIndex) -> None:
    assert len(index.query(["nice"], count=1000)[0]) == len(SENTENCES)
    assert index.query([]) == []


def test_equal_sentences_that_are_kept_come_in_their_order(encoder: SentenceEncoder, tmp_path: Path) -> None:
    texts = ["nice", "The sun", "nice", "a lake", "nice"]
    index = SearchIndex.build(tmp_path / "index", texts, encoder, keep_duplicates=True)
    assert [match.row for match in index.query(["nice"], count=3)[0]] == [1, 3, 5]


@pytest.mark.parametrize("given", ["nice", [""]])
def test_what_cannot_be_asked(index: SearchIndex, given: Any) -> None:
    if given == "nice":
        assert "texts is one string" in refusal(index.query, given)
    else:
        assert "count is 0" in refusal(index.query, given, count=0)
        assert "expected (questions, 32)" in refusal(index.search, np.zeros((1, 7)))


# --- the folder -----------------------------------------------------------------------------------------------------


def test_an_index_that_is_loaded_answers_the_same(index: SearchIndex) -> None:
    assert SearchIndex.load(index.folder).query(["a lake"], count=4) == index.query(["a lake"], count=4)
    assert isinstance(SearchIndex.load(index.folder).vectors, np.memmap)


def test_empty_sentences_and_duplicates_are_left_out_and_rows_still_count_them(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    index = SearchIndex.build(tmp_path / "index", ["nice", "", "nice", "  ", "é 日本 🙂\u2028."], encoder)
    assert (len(index), index.manifest.empty, index.manifest.duplicates) == (2, 2, 1)
    assert {(match.row, match.text) for match in index.query(["nice"])[0]} == {(1, "nice"), (5, "é 日本 🙂\u2028.")}


def test_windows_of_a_long_stream_join(encoder: SentenceEncoder, index: SearchIndex, tmp_path: Path) -> None:
    stream = encoder.embedder.stream
    encoder.embedder.stream = lambda texts, progress: stream(texts, progress=progress, window=3)  # type: ignore[method-assign, assignment, misc]
    try:
        found = SearchIndex.build(tmp_path / "index", iter(SENTENCES), encoder)
    finally:
        del encoder.embedder.stream
    assert [found.text(place) for place in range(len(found))] == SENTENCES
    np.testing.assert_allclose(found.vectors, index.vectors, atol=1e-6)


def test_half_precision_takes_half_the_room_and_finds_the_same(
    encoder: SentenceEncoder, index: SearchIndex, tmp_path: Path
) -> None:
    half = SearchIndex.build(tmp_path / "index", SENTENCES, encoder, numbers="float16")
    sizes = [(one.folder / "vectors.npy").stat().st_size - 128 for one in (index, half)]
    assert sizes[0] == 2 * sizes[1] == len(SENTENCES) * 32 * 4
    for one, other in zip(index.query(TEXTS), half.query(TEXTS), strict=True):
        np.testing.assert_allclose([m.score for m in one], [m.score for m in other], atol=1e-3)


def test_no_sentences_leave_no_folder(encoder: SentenceEncoder, tmp_path: Path) -> None:
    for texts in ([], ["", " "]):
        assert "no sentences" in refusal(SearchIndex.build, tmp_path / "index", texts, encoder)
        assert list(tmp_path.iterdir()) == []


def test_an_end_on_the_way_leaves_the_older_index(encoder: SentenceEncoder, tmp_path: Path) -> None:
    def breaks() -> Any:
        yield "The sun"
        raise RuntimeError("the disk is gone")

    SearchIndex.build(tmp_path / "index", ["nice"], encoder)
    with pytest.raises(RuntimeError):
        SearchIndex.build(tmp_path / "index", breaks(), encoder, overwrite=True)
    assert [match.text for match in SearchIndex.load(tmp_path / "index").query(["a"], encoder=encoder)[0]] == ["nice"]
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_what_is_there_is_not_replaced_unasked(encoder: SentenceEncoder, tmp_path: Path) -> None:
    SearchIndex.build(tmp_path / "index", ["nice"], encoder)
    assert "--overwrite replaces it" in refusal(SearchIndex.build, tmp_path / "index", ["a lake"], encoder)
    assert len(SearchIndex.build(tmp_path / "index", ["a", "lake"], encoder, overwrite=True)) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    message = refusal(SearchIndex.build, tmp_path / "mine", ["a lake"], encoder, overwrite=True)
    assert "there already, and no index" in message


@pytest.mark.parametrize("name", ["vectors.npy", "texts.utf8", "offsets.npy", "rows.npy", "index.json"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_index_is_refused(index: SearchIndex, tmp_path: Path, name: str, how: str) -> None:
    shutil.copytree(index.folder, tmp_path / "index")
    path = tmp_path / "index" / name
    content = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    assert name in refusal(SearchIndex.load, tmp_path / "index")


def test_an_index_of_another_format_is_refused(index: SearchIndex, tmp_path: Path) -> None:
    shutil.copytree(index.folder, tmp_path / "index")
    path = tmp_path / "index" / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    assert "format 99; this minbert reads format 1" in refusal(SearchIndex.load, tmp_path / "index")


# --- which model ----------------------------------------------------------------------------------------------------


def test_a_question_by_another_model_is_refused(
    encoder: SentenceEncoder, index: SearchIndex, tiny_encoder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_encoder, tmp_path / "moved")
    moved = SentenceEncoder.load(tmp_path / "moved")
    assert index.query(["nice"], encoder=moved) == index.query(["nice"], encoder=encoder)  # the same, elsewhere
    tokenizer, model, manifest = make(tiny_encoder)
    save_model(tmp_path / "model", model, tokenizer, manifest)
    for other in (
        SentenceEncoder.load(tmp_path / "model"),
        SentenceEncoder.load(tiny_encoder, pooling="cls"),
    ):
        message = refusal(index.query, ["nice"], encoder=other)
        assert "built with" in message and "pooling cls" in message
    assert describe_model(tiny_encoder) == encoder.origin


def test_a_trained_model_gives_its_own_vectors(tiny_encoder: Path, tmp_path: Path) -> None:
    tokenizer, model, manifest = make(tiny_encoder, pooling="max")
    save_model(tmp_path / "model", model, tokenizer, manifest)
    found = SentenceEncoder.load(tmp_path / "model").embed(TEXTS)
    np.testing.assert_allclose(found, Predictor.load(tmp_path / "model").embed(TEXTS), atol=1e-5)
    assert f"expected its model: {tmp_path / 'model'}" in refusal(SentenceEncoder.load, tmp_path)


def test_an_export_and_its_model_share_an_index(tiny_encoder: Path, tmp_path: Path) -> None:
    """Built by the one, asked by the other; but not by the export of another model, nor pooled in another way."""
    for name, seed in (("model", 1), ("other", 2)):
        tokenizer, model, manifest = make(tiny_encoder, {"sst": {"pooling": "cls"}}, seed=seed, pooling="max")
        save_model(tmp_path / name, model, tokenizer, manifest)
        export(tmp_path / name, to="onnx", out=tmp_path / f"{name}-onnx")
    own, exported = (SentenceEncoder.load(tmp_path / name) for name in ("model", "model-onnx"))
    np.testing.assert_allclose(exported.embed(TEXTS), own.embed(TEXTS), atol=1e-5)
    for number, (built, asked) in enumerate(((own, exported), (exported, own))):
        index = SearchIndex.build(tmp_path / f"index{number}", SENTENCES, built)
        found, expected = (index.query(PAIRS, 3, encoder=one) for one in (asked, built))
        assert [[match.row for match in row] for row in found] == [[match.row for match in row] for row in expected]
        loaded = SearchIndex.load(index.folder)
        assert loaded.query(["nice"], 1) == index.query(["nice"], 1)  # by the model that it names
        for other in (
            SentenceEncoder.load(tmp_path / "other-onnx"),
            SentenceEncoder.load(tmp_path / "model-onnx", pooling="cls"),
        ):
            assert "whose vectors lie in another space" in refusal(index.query, ["nice"], encoder=other)
    mean = SentenceEncoder.load(tmp_path / "model-onnx", pooling="mean")
    assert refusal(mean.embed, TEXTS) == 'pooling is "mean"; this encoder has: max, cls'


# --- sentences of a file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "column", "expected"),
    [
        ("a.txt", "one, two\r\n\nthree", "", ["one, two", "", "three"]),
        ("a.csv", 'id,text\n1,"one, two"\n2,three\n', "", ["one, two", "three"]),
        ("a.tsv", "id\tsentence\n1\tone\n", "", ["one"]),
        ("a.csv", "id,title\n1,one\n", "title", ["one"]),
        ("a.jsonl", '{"title": "one"}\n{"title": null}\n', "", ["one", ""]),
    ],
)
def test_sentences_of_a_file(tmp_path: Path, name: str, content: str, column: str, expected: list[str]) -> None:
    (tmp_path / name).write_text(content, newline="")
    assert list(read_sentences(tmp_path / name, column)) == expected


def test_a_file_that_leaves_the_column_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,title\n1,one\n")
    assert "say --column; found: id, title" in refusal(list, read_sentences(tmp_path / "a.csv"))
    message = refusal(list, read_sentences(tmp_path / "a.csv", "titel"))
    assert ':2: no column "titel" (did you mean "title"?)' in message
    assert "expected a file that can be read" in refusal(list, read_sentences(tmp_path / "b.txt"))


# --- a graph for large sets -----------------------------------------------------------------------------------------


def test_without_faiss_a_graph_says_how_to_install_it(
    encoder: SentenceEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'minbert\[search\]'"):
        SearchIndex.build(tmp_path / "index", ["nice"], encoder, kind="hnsw")
    assert list(tmp_path.iterdir()) == []


def test_the_recall_does_not_count_that_a_sentence_finds_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = unit(np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32))
    assert build_graph(vectors, tmp_path / "graph.faiss", np.random.default_rng(1)) > 0.9
    monkeypatch.setattr(
        "minbert.delivery.nearest.ask_graph", lambda _graph, asked, _count: nearest(vectors, asked, 1)
    )  # nothing but the sentence
    assert build_graph(vectors, tmp_path / "graph.faiss", np.random.default_rng(1)) == 0


def test_a_graph_finds_nearly_all_and_says_how_many(encoder: SentenceEncoder, tmp_path: Path) -> None:
    words = sorted({word for text in SENTENCES for word in text.split()})
    rng = np.random.default_rng(3)
    texts = [" ".join(rng.choice(words, 8)) for _ in range(1500)]
    built = SearchIndex.build(tmp_path / "index", texts, encoder, kind="hnsw")
    assert built.manifest.recall is not None and 0.9 < built.manifest.recall <= 1
    graph = SearchIndex.load(tmp_path / "index")
    asked = encoder.embed(texts[:50])
    (_, found), (scores, exact) = graph.search(asked), graph.search(asked, exact=True)
    overlap = np.mean([len(set(one) & set(other)) / 10 for one, other in zip(found, exact, strict=True)])
    assert overlap > 0.9
    assert (np.diff(scores, axis=1) <= 0).all()


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_builds_and_answers(minbert: Command, tiny_encoder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "a.txt").write_text("\n".join([*SENTENCES, "", "nice"]))
    ended = minbert("search", "build", tmp_path / "a.txt", "--model", tiny_encoder, "--out", tmp_path / "index")
    assert ended.code == 0, ended.err
    assert "8 sentences" in ended.err and "1 empty, 1 duplicates" in ended.err
    (tmp_path / "questions.txt").write_text("\n" * 300 + "The sun\n")
    ended = minbert("search", "query", tmp_path / "index", "--input", tmp_path / "questions.txt", "--count", "2")
    (line,) = ended.out.splitlines()
    assert json.loads(line)["text"] == "The sun"
    assert [sorted(match) for match in json.loads(line)["matches"]] == [["row", "score", "text"]] * 2
    ended = minbert("search", "query", tmp_path / "index", "nice", "--model", "nowhere/here/at-all")
    assert ended.code == 2
    ended = minbert("search", "query", tmp_path / "index", " ")
    assert (ended.code, "no questions" in ended.err) == (2, True)


def test_the_example_of_the_page_runs(
    tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_encoder, tmp_path / "home" / "encoders" / "minilm")
    monkeypatch.setenv("MINBERT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "search.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "docs/search.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2
