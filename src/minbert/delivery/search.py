"""Nearest sentences: an index of a set of sentences by their vectors, and questions to it.

    encoder = SentenceEncoder.load("minilm")                       # or a model folder, such as runs/sample/model
    index = SearchIndex.build(Path("index"), sentences, encoder)
    index.query(["How old is it?"], count=5)                       # five matches: score, row and text of each

An index is a folder:

index/
  index.json             what the vectors came from, how many there are, how they are searched
  vectors.npy            (sentences, width), of length 1, float32 or float16
  texts.utf8             the sentences, end to end
  offsets.npy            where each of them begins, and the end of the last
  rows.npy               which of the given sentences each is, from 1
  graph.faiss            only with kind "hnsw"

All but the graph is mapped into memory and not loaded. The search is exact: a matrix product in blocks, which keeps the
best so far. For millions of sentences there is `kind="hnsw"`, a graph of faiss (the extra `search`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

import numpy as np
from numpy.typing import NDArray

from minbert.atomic import atomic_folder, settle
from minbert.config import ModelConfig
from minbert.data.raw import read_rows
from minbert.delivery.embedder import Embedder
from minbert.delivery.vectors import npy_rows
from minbert.encoders import find_encoder
from minbert.errors import MinbertError, require, shown, suggest
from minbert.recipes import parse_recipe

if TYPE_CHECKING:
    from minbert.delivery.backends import Precision
    from minbert.tasks import PoolingName

FORMAT = 1
MANIFEST = "index.json"
BLOCK = 32_768  # sentences of a matrix product
QUESTIONS = 256  # of a matrix product
SAMPLE = 200  # sentences that the recall of a graph is measured with
NEIGHBOURS = 32  # of a sentence in the graph
BREADTH = 200  # of the search while the graph is built

Kind = Literal["exact", "hnsw"]
NumberType = Literal["float32", "float16"]
Floats = NDArray[np.float32]


# --- what the vectors come from -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """What decides a sentence's vector."""

    model: str
    """A model folder or an encoder, as it was named."""
    fingerprint: str
    """Of the weights, the tokenizer, the pooling and the limit on tokens: equal ones give equal vectors."""
    pooling: PoolingName
    max_tokens: int | None = None
    precision: str = "fp32"
    """Not part of the fingerprint: vectors in int8 are near enough to be compared with those in fp32."""


class Encodes(Protocol):
    """What an index is built and asked with; `SentenceEncoder` is one."""

    @property
    def origin(self) -> Origin: ...

    def embed(self, texts: Sequence[str]) -> Floats:
        """(texts, width)"""


class SentenceEncoder:
    """An embedder that knows where it came from."""

    def __init__(self, embedder: Embedder, origin: Origin) -> None:
        self.embedder, self.origin = embedder, origin

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        pooling: PoolingName | None = None,
        precision: Precision = "fp32",
        device: str = "cpu",
    ) -> SentenceEncoder:
        """From a model folder, or an encoder's folder, hub id or name of the cache.

        Args:
            model: which.
            pooling: default the model's own, and "mean" for a bare encoder.
            precision: see `Embedder.load`.
            device: likewise.
        """
        origin, folder, config = _describe(model, pooling, precision)
        embedder = Embedder.load(
            folder,
            pooling=origin.pooling,
            device=device,
            precision=precision,
            pooling_weights=config.pooling_weights if origin.pooling == "weighted" else None,
        )
        if origin.max_tokens is not None:
            embedder.max_tokens = min(origin.max_tokens, embedder.tokenizer.positions)
        return cls(embedder, origin)

    def embed(self, texts: Sequence[str]) -> Floats:
        return self.embedder.embed(texts)


def describe_model(model: str | Path, *, pooling: PoolingName | None = None, precision: str = "fp32") -> Origin:
    """What the vectors of a model come from, without loading it."""
    return _describe(model, pooling, precision)[0]


def _describe(model: str | Path, pooling: PoolingName | None, precision: str) -> tuple[Origin, Path, ModelConfig]:
    folder = Path(model).expanduser()
    settle(folder)
    if not (folder / "minbert.json").exists() and (folder / "model" / "minbert.json").exists():
        raise MinbertError(f"{shown(folder)}: a run; expected its model: {shown(folder / 'model')}")
    if (folder / "minbert.json").exists():
        config, place = _model_config(folder / "minbert.json"), folder / "encoder"
        chosen, limit, name = pooling or config.pooling, config.max_tokens, str(folder.resolve())
    else:
        config, place = ModelConfig(), find_encoder(model)
        chosen, limit = pooling or "mean", None
        name = str(folder.resolve()) if folder.is_dir() else str(model)
    weights = sorted(config.pooling_weights.items()) if chosen == "weighted" else []
    digest = hashlib.sha256(f"{FORMAT} {chosen} {limit} {weights}".encode())
    for path in sorted(place.iterdir()):
        if path.suffix in (".safetensors", ".bin") or path.name in ("config.json", "tokenizer.json", "vocab.txt"):
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return Origin(name, digest.hexdigest()[:24], chosen, limit, precision), place, config


def _model_config(path: Path) -> ModelConfig:
    """Of a model folder, read without torch, which a search in int8 does not need."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        members, parts = raw.get("members"), {"tasks": raw["tasks"], "model": raw["model"]}
    except (ValueError, OSError, KeyError, AttributeError) as error:
        raise MinbertError(f"{shown(path)}: {error}; expected what minbert train writes") from None
    if members:
        raise MinbertError(
            f"{shown(path.parent)}: an ensemble of {len(members)} models has no single embedding; "
            f"expected one of its members, such as {members[0]}"
        )
    return parse_recipe(parts, shown(path)).model


# --- sentences of a file --------------------------------------------------------------------------------------------


def read_sentences(path: Path, column: str = "") -> Iterator[str]:
    """One a line of a .txt; of a table or JSON lines the column: `text`, `sentence` or the only one, unless named."""
    if path.suffix.lower() == ".txt":
        yield from (str(row["text"]).strip() for _, row in read_rows(path, plain="text"))
        return
    for line, row in read_rows(path):
        if not column:
            usual = [name for name in ("text", "sentence") if name in row]
            if len(row) > 1 and not usual:
                raise MinbertError(f"{shown(path)}: which column? say --column; found: {', '.join(row)}")
            column = (usual or list(row))[0]
        if column not in row:
            raise MinbertError(
                f'{shown(path)}:{line}: no column "{column}"{suggest(column, row)}; found: {", ".join(row)}'
            )
        yield "" if row[column] is None else str(row[column]).strip()


# --- the index ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IndexManifest:
    """What an index's folder says of it."""

    origin: Origin
    count: int
    """Sentences in it."""
    width: int
    numbers: NumberType = "float32"
    kind: Kind = "exact"
    empty: int = 0
    """Given sentences that were empty, and left out."""
    duplicates: int = 0
    """Those that were there already, and left out."""
    truncated: int = 0
    """Those with more tokens than the model reads."""
    recall: float | None = None
    """Of a graph: the part of the ten nearest that it finds, measured at build on some of the sentences."""
    format: int = field(default=FORMAT)


@dataclass(frozen=True)
class Match:
    """A sentence that was found."""

    score: float
    """The cosine with the question."""
    row: int
    """Which of the given sentences it is, from 1; of a .txt the line."""
    text: str


class SearchIndex:
    """An index, opened. `build` or `load` makes one."""

    def __init__(self, folder: Path, manifest: IndexManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.vectors = self._mapped("vectors.npy", (manifest.count, manifest.width))
        self._offsets = self._mapped("offsets.npy", (manifest.count + 1,))
        self._rows = self._mapped("rows.npy", (manifest.count,))
        path = folder / "texts.utf8"
        if not path.exists() or path.stat().st_size != self._offsets[-1]:
            raise MinbertError(f"{shown(path)}: damaged; expected {self._offsets[-1]:,} bytes. Build the index again")
        self._texts = np.memmap(path, np.uint8, "r")
        self._encoder: Encodes | None = None

    def __len__(self) -> int:
        return self.manifest.count

    @classmethod
    def build(
        cls,
        folder: Path,
        texts: Iterable[str],
        encoder: SentenceEncoder,
        *,
        numbers: NumberType = "float32",
        kind: Kind = "exact",
        keep_duplicates: bool = False,
        overwrite: bool = False,
        rng: np.random.Generator | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> SearchIndex:
        """Write an index's folder, whole or not at all, and open it.

        Args:
            folder: where.
            texts: the sentences; a stream of any length. Empty ones are left out.
            encoder: what gives their vectors.
            numbers: "float16" takes half the room, and changes scores by about 0.0005.
            kind: "exact", or "hnsw": a graph, faster for millions of sentences, which may miss some.
            keep_duplicates: also keep sentences that are there already, letter by letter.
            overwrite: replace an index that is there.
            rng: which sentences a graph is measured with.
            progress: told how many more sentences are done.
        """
        for value, name, known in ((numbers, "numbers", NumberType), (kind, "kind", Kind)):
            if value not in get_args(known):
                raise MinbertError(f'{name} is "{value}"; expected one of: {", ".join(get_args(known))}')
        if kind == "hnsw":
            require("faiss", "search", "an index of kind hnsw")
        _check_place(folder, overwrite)
        sentences = _Distinct(texts, keep_duplicates)
        width, ends, cut = encoder.embedder.width, [np.zeros(1, np.int64)], 0
        try:
            with atomic_folder(folder) as new:
                with (
                    npy_rows(new / "vectors.npy", width, "<f2" if numbers == "float16" else "<f4") as write,
                    (new / "texts.utf8").open("wb") as file,
                ):
                    for window, vectors, truncation in encoder.embedder.stream(sentences, progress=progress):
                        write(window, unit(vectors))
                        encoded = [text.encode("utf-8", "replace") for text in window]
                        file.writelines(encoded)
                        ends.append(ends[-1][-1] + np.cumsum([len(text) for text in encoded]))
                        cut += truncation.texts
                count = len(sentences.rows)
                if not count:
                    raise MinbertError(f"no sentences to build {shown(folder)} of; expected one or more")
                np.save(new / "offsets.npy", np.concatenate(ends))
                np.save(new / "rows.npy", np.array(sentences.rows, np.int64))
                recall = None
                if kind == "hnsw":
                    vectors = np.load(new / "vectors.npy", mmap_mode="r")
                    recall = _build_graph(vectors, new / "graph.faiss", rng or np.random.default_rng(1))
                    del vectors
                manifest = IndexManifest(
                    encoder.origin, count, width, numbers, kind, sentences.empty, sentences.duplicates, cut, recall
                )
                (new / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise MinbertError(f"{shown(folder)}: cannot be written ({error.strerror or error})") from None
        index = cls.load(folder)
        index._encoder = encoder
        return index

    @classmethod
    def load(cls, folder: str | Path) -> SearchIndex:
        """Open an index's folder; nothing but its manifest is read now."""
        folder = Path(folder)
        settle(folder)
        path = folder / MANIFEST
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw.get("format") != FORMAT:
                raise MinbertError(
                    f"{shown(path)}: format {raw.get('format')!r}; this minbert reads format {FORMAT}: build it again"
                )
            manifest = IndexManifest(**{**raw, "origin": Origin(**raw["origin"])})
        except FileNotFoundError:
            raise MinbertError(f"{shown(path)}: no such file; expected a folder of minbert search build") from None
        except (ValueError, OSError, TypeError, KeyError, AttributeError) as error:
            raise MinbertError(f"{shown(path)}: damaged ({error}); expected what minbert search build writes") from None
        return cls(folder, manifest)

    def query(self, texts: Sequence[str], count: int = 10, *, encoder: Encodes | None = None) -> list[list[Match]]:
        """The nearest sentences of each text, best first; of equal ones the earlier first.

        Args:
            texts: the questions.
            count: at most so many for each.
            encoder: the model that the index was built with; default: loaded from where it was then.
        """
        if isinstance(texts, str):
            raise MinbertError("texts is one string; expected a list of strings")
        encoder = encoder or self.encoder
        self.check(encoder.origin)
        if not texts:
            return []
        return self.matches(encoder.embed(list(texts)), count)

    def matches(self, vectors: NDArray[np.floating], count: int = 10) -> list[list[Match]]:
        """The same of vectors that the index's model gave, (questions, width)."""
        scores, places = self.search(vectors, count)
        return [
            [
                Match(float(score), int(self._rows[place]), self.text(place))
                for score, place in zip(*found, strict=True)
                if place >= 0
            ]
            for found in zip(scores, places, strict=True)
        ]

    def search(
        self, vectors: NDArray[np.floating], count: int = 10, *, exact: bool = False
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The same of vectors, (questions, width): cosines and places in the index, (questions, count) each.

        With `exact` a graph is not used. Where it finds fewer than `count`, the place is -1.
        """
        if count < 1:
            raise MinbertError(f"count is {count}; expected one or more")
        asked = unit(np.asarray(vectors, np.float32))
        if asked.ndim != 2 or asked.shape[1] != self.manifest.width:
            raise MinbertError(f"vectors of shape {asked.shape}; expected (questions, {self.manifest.width})")
        count = min(count, len(self))
        if self.manifest.kind == "exact" or exact:
            places = nearest(self.vectors, asked, count)
        else:
            places = _ask_graph(self._graph, asked, count)
        return _rank(self.vectors, asked, places)

    def check(self, origin: Origin) -> None:
        """An error if vectors of that origin cannot be compared with those of the index."""
        own = self.manifest.origin
        if origin.fingerprint == own.fingerprint:
            return
        where = f"{shown(self.folder)}: built with {own.model} ({own.fingerprint}, pooling {own.pooling})"
        raise MinbertError(
            f"{where}; found {origin.model} ({origin.fingerprint}, pooling {origin.pooling}), "
            "whose vectors lie in another space. Build the index again, or ask with the same model"
        )

    @property
    def encoder(self) -> Encodes:
        """The model that the index was built with, from where it was then."""
        if self._encoder is None:
            origin = self.manifest.origin
            self._encoder = SentenceEncoder.load(
                origin.model, pooling=origin.pooling, precision=cast("Precision", origin.precision)
            )
        return self._encoder

    def text(self, place: int) -> str:
        """The sentence at a place of the index."""
        start, end = self._offsets[place : place + 2]
        return bytes(self._texts[start:end]).decode("utf-8")

    @cached_property
    def _graph(self) -> Any:
        faiss: Any = require("faiss", "search", "an index of kind hnsw")
        path = self.folder / "graph.faiss"
        try:
            return faiss.read_index(str(path))
        except RuntimeError:
            raise MinbertError(f"{shown(path)}: missing or damaged; build the index again") from None

    def _mapped(self, name: str, shape: tuple[int, ...]) -> Any:
        path = self.folder / name
        try:
            found = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise MinbertError(f"{shown(path)}: missing or damaged ({error}); build the index again") from None
        if found.shape != shape:
            raise MinbertError(f"{shown(path)}: shape {found.shape}; expected {shape}. Build the index again")
        return found


class _Distinct:
    """A stream's sentences without the empty ones and, unless they are wanted, those that came before."""

    def __init__(self, texts: Iterable[str], keep_duplicates: bool) -> None:
        self._texts, self._keep = texts, keep_duplicates
        self.rows: list[int] = []
        self.empty = self.duplicates = 0

    def __iter__(self) -> Iterator[str]:
        seen: set[bytes] = set()  # of digests: the sentences themselves may not fit
        for row, text in enumerate(self._texts, start=1):
            if not text.strip():
                self.empty += 1
                continue
            if not self._keep:
                digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
                if digest in seen:
                    self.duplicates += 1
                    continue
                seen.add(digest)
            self.rows.append(row)
            yield text


def unit(vectors: Floats) -> Floats:
    """Vectors of length 1; one of nothing but zeros stays."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)


def nearest(vectors: NDArray[np.floating], asked: Floats, count: int, *, block: int = BLOCK) -> NDArray[np.int64]:
    """Places of the rows with the largest products, (questions, count), best first.

    One block of rows is multiplied with the questions at a time; only its rows that beat the worst of the best so far
    are looked at, so that after a few blocks there is next to nothing to sort.
    """
    places = np.empty((len(asked), count), np.int64)
    for begin in range(0, len(asked), QUESTIONS):
        part = asked[begin : begin + QUESTIONS]
        scores = [np.empty(0, np.float32)] * len(part)
        found = [np.empty(0, np.int64)] * len(part)
        for start in range(0, len(vectors), block):
            products = np.asarray(vectors[start : start + block], np.float32) @ part.T  # (block, questions)
            for number, row in enumerate(np.ascontiguousarray(products.T)):
                full = len(scores[number]) == count
                better = np.flatnonzero(row > scores[number][-1]) if full else np.arange(len(row))
                if not len(better):
                    continue
                if len(better) > count:  # all that are at least as good as the last that can be among the best
                    limit = np.partition(row[better], len(better) - count)[len(better) - count]
                    better = better[row[better] >= limit]
                both = np.concatenate([scores[number], row[better]])
                order = np.argsort(-both, kind="stable")[:count]  # of equal ones the earlier
                scores[number] = both[order]
                found[number] = np.concatenate([found[number], start + better])[order]
        places[begin : begin + QUESTIONS] = found
    return places


def _rank(
    vectors: NDArray[np.floating], asked: Floats, places: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Cosines in double precision, by which the found are sorted once more: equal vectors have equal scores then,
    whatever block they were in."""
    products = vectors[np.maximum(places, 0)].astype(np.float64) * asked.astype(np.float64)[:, None]
    scores = np.where(places < 0, -np.inf, np.clip(products.sum(-1), -1, 1))  # (questions, count)
    order = np.lexsort((places, -scores))
    return np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)


def _build_graph(vectors: Any, path: Path, rng: np.random.Generator) -> float:
    """Write a graph of the vectors; the part of the ten nearest that it finds, of some of the sentences."""
    faiss: Any = require("faiss", "search", "an index of kind hnsw")
    graph = faiss.IndexHNSWFlat(vectors.shape[1], NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = BREADTH
    for start in range(0, len(vectors), BLOCK):
        graph.add(np.ascontiguousarray(vectors[start : start + BLOCK], np.float32))
    faiss.write_index(graph, str(path))
    sample = np.sort(rng.permutation(len(vectors))[:SAMPLE])
    asked, count = np.asarray(vectors[sample], np.float32), min(11, len(vectors))  # its own, and ten
    exact, found = nearest(vectors, asked, count), _ask_graph(graph, asked, count)
    hits = [len(set(one) & set(other)) / count for one, other in zip(exact.tolist(), found.tolist(), strict=True)]
    return float(np.mean(hits))


def _ask_graph(graph: Any, asked: Floats, count: int) -> NDArray[np.int64]:
    faiss: Any = require("faiss", "search", "an index of kind hnsw")
    breadth = faiss.SearchParametersHNSW(efSearch=max(64, 4 * count))
    return graph.search(np.ascontiguousarray(asked), count, params=breadth)[1]


def _check_place(folder: Path, overwrite: bool) -> None:
    settle(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MANIFEST).exists():
        raise MinbertError(f"{shown(folder)}: there already, and no index; expected another place")
    if not overwrite:
        raise MinbertError(f"{shown(folder)}: an index is there already; --overwrite replaces it")
