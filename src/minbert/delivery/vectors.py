"""Where vectors go: .npy, .jsonl or .parquet, window by window, without ever holding them all."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

from minbert.errors import MinbertError, require, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    Write = Callable[[Sequence[str], NDArray[np.float32]], None]

SUFFIXES = (".npy", ".jsonl", ".parquet")


@contextmanager
def open_vectors(path: Path | None, width: int) -> Iterator[Write]:
    """A function that takes texts and their vectors. A file appears under its name only when everything is written."""
    if path is None:
        yield lambda texts, vectors: _write_jsonl(sys.stdout, texts, vectors)
        return
    if path.suffix not in SUFFIXES:
        raise MinbertError(f'{shown(path)}: unknown output "{path.suffix}"; expected {", ".join(SUFFIXES)}')
    partial = path.with_name(path.name + ".part")
    writers: dict[str, Callable[[Path, int], AbstractContextManager[Write]]]
    writers = {".npy": npy_rows, ".jsonl": _jsonl, ".parquet": _parquet}
    try:
        with writers[path.suffix](partial, width) as write:
            yield write
        partial.replace(path)
    except OSError as error:
        raise MinbertError(f"{shown(path)}: cannot be written ({error.strerror})") from None
    finally:
        if partial.exists():
            partial.unlink()


@contextmanager
def npy_rows(path: Path, width: int, kind: Literal["<f4", "<f2"] = "<f4") -> Iterator[Write]:
    """A .npy file of float32 or float16. Its header is written twice: its length is fixed, and the number of rows is
    known only at the end."""
    rows = 0

    def header(file: IO[bytes], count: int) -> None:
        shape = f"({count}, {width})".ljust(32)  # padded, so that the second header is as long as the first
        text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}"
        body = text.ljust(128 - 10 - 1).encode("latin1") + b"\n"
        file.write(b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body)

    def write(_: Sequence[str], vectors: NDArray[np.float32]) -> None:
        nonlocal rows
        rows += len(vectors)
        file.write(vectors.astype(kind).tobytes())

    with path.open("wb") as file:
        header(file, 0)
        yield write
        file.seek(0)
        header(file, rows)


@contextmanager
def _jsonl(path: Path, _: int) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda texts, vectors: _write_jsonl(file, texts, vectors)


@contextmanager
def _parquet(path: Path, width: int) -> Iterator[Write]:
    arrow: Any = require("pyarrow", "parquet", "Parquet output")
    parquet: Any = require("pyarrow.parquet", "parquet", "Parquet output")
    schema = arrow.schema([("text", arrow.string()), ("vector", arrow.list_(arrow.float32(), width))])

    def write(texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
        column = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors.reshape(-1)), width)
        file.write_table(arrow.table([arrow.array(list(texts)), column], schema=schema))

    with parquet.ParquetWriter(path, schema) as file:
        yield write


def _write_jsonl(file: IO[str], texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
    for text, vector in zip(texts, vectors, strict=True):
        numbers = [float(f"{value:.7g}") for value in vector]
        file.write(json.dumps({"text": text, "vector": numbers}, ensure_ascii=False) + "\n")
