"""Vectors of texts against sentence-transformers and against one text at a time; and the files they go to."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from minbert.delivery.embedder import Embedder
from minbert.delivery.vectors import open_vectors
from minbert.errors import MinbertError, MissingExtraError
from minbert.model.encoder import POOLINGS, Pooling
from minbert.model.multitask import TOKEN_BUDGET
from minbert.model.pretrained import save_encoder
from tests.broken import change_tensors

TEXTS = [
    "the cat sat.",
    "a dog ran and then the dog sat and then the bird sang.",
    "hello",
    "",
    "birds sang. dogs ran. cats sat.",
    "the " * 25,
    "hello world",
    "something unknown",
]
SENTENCES = """The old ferry left the harbour an hour late. Nobody on board seemed to mind.
A child counted gulls; her brother counted lighthouses, and both of them lost count before the second island.
"Will it rain?" asked the man with the umbrella. It rained. Café owners pulled their chairs inside.
What is the capital of Mongolia? Ulaanbaatar. How do I reset my password if I no longer have the e-mail address?
The committee, having met for eleven hours without a break, without a quorum and without a clear idea of what it had
been asked to decide, adjourned. Prices rose 3.7% in May! They fell again in June. No. Yes, probably.
I loved every minute of that movie. The soup was cold and the waiter rude. 日本語も少し。 It's fine, isn't it?"""
WINDOWS = [SENTENCES[20 * row :][: (9, 40, 160, 600)[row % 4]] for row in range(38)]


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Embedder:
    return Embedder.load(tiny_folder)


def one_by_one(embedder: Embedder, texts: list[str]) -> np.ndarray:
    """The obvious way: no batches, no padding, no mask, pooling written out."""
    rows = []
    for ids, _ in embedder.tokenizer.encode(texts):
        with torch.inference_mode():
            hidden = embedder.encoder(torch.from_numpy(ids.astype(np.int64))[None])
            pooled = embedder.encoder.pooler(hidden)[0]
        found = {"mean": hidden[0].mean(0), "max": hidden[0].amax(0), "cls": hidden[0, 0], "pooler": pooled}
        rows.append(found[embedder.pooling].numpy())
    return np.stack(rows)


@pytest.mark.parity
def test_equals_sentence_transformers(minilm: Path) -> None:
    import sentence_transformers as library

    sentences = [sentence.strip() for sentence in SENTENCES.replace("\n", " ").split(".")]
    sentences += [*WINDOWS, 5 * SENTENCES]  # the last is cut to 512 tokens
    assert len(sentences) > 50
    theirs = library.SentenceTransformer(str(minilm), device="cpu")
    assert theirs.max_seq_length == 512
    expected = theirs.encode(sentences, batch_size=8, show_progress_bar=False)
    found = Embedder.load(minilm).embed(sentences)
    difference = np.abs(found - expected).max()
    print(f"\nlargest difference to sentence-transformers {library.__version__}: {difference:.1e}")
    assert difference <= 1e-5


@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_pooling_equals_one_text_at_a_time(tiny_folder: Path, pooling: Pooling) -> None:
    embedder = Embedder.load(tiny_folder, pooling=pooling)
    found = embedder.embed(TEXTS)
    assert found.shape == (len(TEXTS), embedder.width) == (8, 16)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, one_by_one(embedder, TEXTS), atol=1e-5)


def test_real_texts_do_not_depend_on_their_company(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder.load(minilm)
    texts = WINDOWS[:16]
    together = embedder.embed(texts)
    np.testing.assert_allclose(embedder.embed(texts[::-1]), together[::-1], atol=1e-5)
    monkeypatch.setitem(TOKEN_BUDGET, "cpu", 200)
    np.testing.assert_allclose(embedder.embed(texts), together, atol=1e-5)
    np.testing.assert_allclose(one_by_one(embedder, texts), together, atol=1e-5)


@given(order=st.lists(st.integers(0, len(TEXTS) - 1), max_size=20), budget=st.integers(1, 200))
def test_order_is_kept_in_any_company(tiny: Embedder, order: list[int], budget: int) -> None:
    whole = tiny.embed(TEXTS)
    before = TOKEN_BUDGET["cpu"]
    TOKEN_BUDGET["cpu"] = budget
    try:
        found = tiny.embed([TEXTS[row] for row in order])
    finally:
        TOKEN_BUDGET["cpu"] = before
    np.testing.assert_allclose(found, whole[order], atol=1e-5)


def test_nothing_gives_no_rows(tiny: Embedder) -> None:
    assert tiny.embed([]).shape == (0, 16)
    assert list(tiny.stream([])) == []


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_a_stream_equals_one_call(tiny: Embedder, window: int) -> None:
    done: list[int] = []
    parts = list(tiny.stream(iter(TEXTS), window=window, progress=done.append))
    assert [text for texts, _, _ in parts for text in texts] == TEXTS
    assert all(len(texts) == window for texts, _, _ in parts[:-1])
    np.testing.assert_allclose(np.concatenate([vectors for _, vectors, _ in parts]), tiny.embed(TEXTS), atol=1e-5)
    assert sum(done) == len(TEXTS)


def test_a_stream_is_read_no_further_than_needed(tiny: Embedder) -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "the cat sat."

    texts, vectors, _ = next(tiny.stream(endless(), window=5))
    assert (len(texts), vectors.shape) == (5, (5, 16))


def test_progress_adds_up(tiny: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOKEN_BUDGET, "cpu", 30)
    done: list[int] = []
    tiny.embed(TEXTS, progress=done.append)
    assert sum(done) == len(TEXTS)
    assert len(done) > 2


def test_truncation_is_counted(tiny_folder: Path) -> None:
    embedder = Embedder.load(tiny_folder, max_tokens=5)
    ((_, vectors, cut),) = embedder.stream(["the cat sat.", "the cat", "a dog ran and sat"])
    assert (cut.texts, cut.tokens) == (2, 3)
    np.testing.assert_allclose(vectors[2], embedder.embed(["a dog ran"])[0], atol=1e-5)
    ((_, _, cut),) = Embedder.load(tiny_folder).stream(["the " * 31])  # 33 tokens, 32 positions
    assert (cut.texts, cut.tokens) == (1, 1)


def test_the_encoder_stands_still(tiny_folder: Path) -> None:
    embedder = Embedder.load(tiny_folder)
    assert not embedder.encoder.training
    assert np.array_equal(embedder.embed(TEXTS), embedder.embed(TEXTS))


def without_pooler(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("pooler.")]:
        del tensors[name]


def test_bad_settings_are_refused(tiny: Embedder, tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        MinbertError, match=r'^pooling is "average"; expected one of: cls, pooler, mean, max, weighted$'
    ):
        Embedder(tiny.encoder, tiny.tokenizer, pooling="average")  # type: ignore[arg-type]
    for device in ("nonsense", "cuda:99"):
        with pytest.raises(MinbertError, match=rf'^device is "{device}" \(.+\); expected one that is here') as caught:
            Embedder(tiny.encoder, tiny.tokenizer, device=device)
        assert "\n" not in str(caught.value)
    with pytest.raises(MinbertError, match=r"^max_tokens is 99; this encoder takes 3 to 32 for texts$"):
        Embedder(tiny.encoder, tiny.tokenizer, max_tokens=99).embed(["hello"])
    bare = Path(shutil.copytree(tiny_folder, tmp_path / "bare"))
    change_tensors(without_pooler)(bare)
    with pytest.raises(MinbertError, match=r'bare" has no pooler weights; expected --pooling mean or cls$'):
        Embedder.load(bare, pooling="pooler")
    assert Embedder.load(bare, pooling="cls").embed(["hello"]).shape == (1, 16)


def test_a_tokenizer_with_too_many_words_is_found_out(tiny: Embedder, tiny_folder: Path, tmp_path: Path) -> None:
    save_encoder(tiny.encoder, tmp_path)
    (tmp_path / "vocab.txt").write_text((tiny_folder / "vocab.txt").read_text() + "zebra\n")
    with pytest.raises(MinbertError, match=r"^token id 19; expected 0 to 18 \(the vocabulary\)$"):
        Embedder.load(tmp_path).embed(["a zebra"])


VECTORS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
LINES = ["one", 'zwei "drei"', "", "日本\n語", "five\t"]


def write(path: Path, *sizes: int) -> None:
    """Everything, in windows of these sizes."""
    start = 0
    with open_vectors(path, 3) as put:
        for size in sizes:
            put(LINES[start : start + size], VECTORS[start : start + size])
            start += size


@pytest.mark.parametrize("sizes", [(), (5,), (2, 3), (1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".parquet"])
def test_what_is_written_can_be_read(tmp_path: Path, suffix: str, sizes: tuple[int, ...]) -> None:
    path, count = tmp_path / f"vectors{suffix}", sum(sizes)
    write(path, *sizes)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    texts = LINES[:count]
    if suffix == ".npy":
        vectors = np.load(path)
        mapped = np.load(path, mmap_mode="r")
        assert np.array_equal(mapped, vectors)
        assert vectors.dtype == np.float32
        assert vectors.shape == (count, 3)
        assert np.array_equal(vectors, VECTORS[:count])
    elif suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [row["text"] for row in rows] == texts
        found = np.array([row["vector"] for row in rows]).reshape(count, 3)
        np.testing.assert_allclose(found, VECTORS[:count], rtol=1e-6)
    else:
        table = parquet.read_table(path)
        assert table["text"].to_pylist() == texts
        found = np.array(table["vector"].to_pylist(), dtype=np.float32).reshape(count, 3)
        assert np.array_equal(found, VECTORS[:count])
        assert str(table.schema.field("vector").type) == "fixed_size_list<element: float>[3]"


def test_without_a_path_lines_go_to_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with open_vectors(None, 3) as put:
        put(LINES, VECTORS)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == LINES


@pytest.mark.parametrize("name", ["vectors.csv", "vectors", "vectors.NPZ"])
def test_unknown_outputs_are_refused(tmp_path: Path, name: str) -> None:
    suffix = Path(name).suffix
    with pytest.raises(MinbertError, match=f'unknown output "{suffix}"; expected .npy, .jsonl, .parquet$'):
        write(tmp_path / name, 5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".parquet"])
def test_a_failure_leaves_nothing_and_keeps_what_was_there(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"vectors{suffix}"
    path.write_text("before")

    def fail_midway() -> None:
        with open_vectors(path, 3) as put:
            put(LINES[:2], VECTORS[:2])
            raise MinbertError("the texts ran out")

    with pytest.raises(MinbertError, match="the texts ran out"):
        fail_midway()
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "before"


@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".parquet"])
def test_places_that_cannot_be_written(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / f"folder{suffix}").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for place in ("missing/vectors", "file/vectors", "folder"):
        with pytest.raises(MinbertError, match=rf"{place}{suffix}: cannot be written \(.+\)$"):
            write(tmp_path / f"{place}{suffix}", 5)
    assert sorted(tmp_path.rglob("*")) == before


def test_parquet_without_pyarrow_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: dict[str, Any] = {"pyarrow": None, "pyarrow.parquet": None}
    for name, value in gone.items():
        monkeypatch.setitem(sys.modules, name, value)
    with pytest.raises(MissingExtraError, match=r"pip install 'minbert\[parquet\]'$"):
        write(tmp_path / "vectors.parquet", 5)
    assert list(tmp_path.iterdir()) == []
