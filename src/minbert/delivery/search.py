"""Nearest sentences: an index of a set of sentences by their vectors, and questions to it.

    encoder = SentenceEncoder.load("minilm")                       # or a model folder, or an export
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
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from minbert.atomic import atomic_folder, settle
from minbert.delivery.nearest import QUESTIONS, ask_graph, build_graph, nearest, rank, unit
from minbert.delivery.sentences import Encodes, Origin, SentenceEncoder, describe_model, read_sentences
from minbert.delivery.vectors import npy_rows
from minbert.errors import MinbertError, require, shown

if TYPE_CHECKING:
    from minbert.delivery.backends import Precision

__all__ = [
    "QUESTIONS",
    "Encodes",
    "IndexManifest",
    "Match",
    "Origin",
    "SearchIndex",
    "SentenceEncoder",
    "describe_model",
    "nearest",
    "read_sentences",
    "unit",
]

FORMAT = 1
MANIFEST = "index.json"

Kind = Literal["exact", "hnsw"]
NumberType = Literal["float32", "float16"]


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
                    recall = build_graph(vectors, new / "graph.faiss", rng or np.random.default_rng(1))
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
            places = ask_graph(self._graph, asked, count)
        return rank(self.vectors, asked, places)

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


def _check_place(folder: Path, overwrite: bool) -> None:
    settle(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MANIFEST).exists():
        raise MinbertError(f"{shown(folder)}: there already, and no index; expected another place")
    if not overwrite:
        raise MinbertError(f"{shown(folder)}: an index is there already; --overwrite replaces it")
