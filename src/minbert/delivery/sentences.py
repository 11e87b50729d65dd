"""Sentences and where their vectors come from: what an index of `search.py` is made of.

encoder = SentenceEncoder.load("minilm")           # or a model folder, such as runs/sample/model, or an export
encoder.embed(list(read_sentences(Path("sentences.txt"))))
encoder.origin.fingerprint                         # equal ones give equal vectors
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from minbert.atomic import settle
from minbert.data.raw import read_rows
from minbert.delivery.embedder import Embedder
from minbert.delivery.exported import describe_folder, is_export, read_export
from minbert.encoders import find_encoder, weight_files
from minbert.errors import MinbertError, shown, suggest
from minbert.model.manifest import MANIFEST, read_manifest

if TYPE_CHECKING:
    from minbert.delivery.backends import Precision
    from minbert.tasks import PoolingName

FORMAT = 1  # of a fingerprint
Floats = NDArray[np.float32]


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
        """From a model folder, an export, or an encoder's folder, hub id or name of the cache.

        Args:
            model: which.
            pooling: default the model's own, and "mean" for a bare encoder.
            precision: see `Embedder.load`; an export has one precision, and runs in that.
            device: likewise.
        """
        source = _find(model, pooling)
        weights = source.weights or None
        embedder = Embedder.load(
            source.folder, pooling=source.pooling, device=device, precision=precision, pooling_weights=weights
        )
        origin = source.origin(precision)
        if origin.max_tokens is not None:
            embedder.max_tokens = min(origin.max_tokens, embedder.tokenizer.positions)
        return cls(embedder, origin)

    def embed(self, texts: Sequence[str]) -> Floats:
        return self.embedder.embed(texts)


def describe_model(model: str | Path, *, pooling: PoolingName | None = None, precision: str = "fp32") -> Origin:
    """What the vectors of a model come from, without loading it."""
    return _find(model, pooling).origin(precision)


@dataclass(frozen=True)
class _Source:
    """Where an encoder lies, and everything that its vectors depend on."""

    name: str
    folder: Path
    files: Mapping[str, str]
    pooling: PoolingName
    max_tokens: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    precision: str = ""
    """Of an export."""

    def origin(self, precision: str) -> Origin:
        digest = hashlib.sha256(f"{FORMAT} {self.pooling} {self.max_tokens} {sorted(self.weights.items())}".encode())
        for name, found in self.files.items():
            digest.update(name.encode() + bytes.fromhex(found))
        fingerprint = digest.hexdigest()[:24]
        return Origin(self.name, fingerprint, self.pooling, self.max_tokens, self.precision or precision)


def _find(model: str | Path, pooling: PoolingName | None) -> _Source:
    folder = Path(model).expanduser()
    settle(folder)
    name = str(folder.resolve())
    if is_export(folder):
        raw, about = read_export(folder), describe_folder(folder)
        # An index that the model built can be asked by its export, whose vectors were compared with the model's.
        files = raw["encoder"] or weight_files(folder)
        return _Source(
            name, folder, files, pooling or about.model.pooling, about.model.max_tokens, precision=raw["precision"]
        )
    if (folder / MANIFEST).exists():
        about = read_manifest(folder)
        if about.members:
            raise MinbertError(
                f"{shown(folder)}: an ensemble of {len(about.members)} models has no single embedding; "
                f"expected one of its members, such as {about.members[0]}"
            )
        chosen, place = pooling or about.model.pooling, folder / "encoder"
        weights = about.model.pooling_weights if chosen == "weighted" else {}
        return _Source(name, place, weight_files(place), chosen, about.model.max_tokens, weights)
    if (folder / "model" / MANIFEST).exists():
        raise MinbertError(f"{shown(folder)}: a run; expected its model: {shown(folder / 'model')}")
    place = find_encoder(model)
    return _Source(name if folder.is_dir() else str(model), place, weight_files(place), pooling or "mean")


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
