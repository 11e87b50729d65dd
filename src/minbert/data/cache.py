"""Tokens of texts that were tokenized before: kept on disk, found by what the texts are, mapped into memory.

    cache = TokenCache.from_environment()      # None where MINBERT_TOKEN_CACHE is off
    tokens = cache.encode(tokenizer, texts, pairs, max_tokens=256)

An entry is a folder named by a hash of everything that decides the tokens, so there is nothing to invalidate: other
texts are another entry. The cache only ever saves time. Damage is found by checksums and means tokenizing again; a
folder that cannot be written means going without; the entry that was not used for longest makes room for the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from minbert.data.parts_of_speech import tagger
from minbert.data.tokenizer import Tokenizer, Tokens, Truncation
from minbert.encoders import home
from minbert.errors import MinbertError

FORMAT = 1  # of an entry; another number is another key
LIMIT = 4 << 30  # bytes
SMALLEST = 2000  # texts: fewer are tokenized in less time than a person notices, and would litter the cache
ARRAYS = {"ids": np.int32, "segments": np.uint8, "offsets": np.int64}
WEIGHTS = {"weights": np.float32}  # only where they were asked for
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
LEFTOVER = 24 * 3600.0  # seconds: a folder of a writer that old has no writer any more


@dataclass(frozen=True)
class Entry:
    """One set of tokens on disk."""

    folder: Path
    bytes: int
    used: float
    """When it was last read or written, in seconds since 1970."""


class TokenCache:
    """Tokenizes what it has not seen, and remembers it.

    Args:
        folder: holds a folder for each entry.
        limit: bytes that all entries together may take.
        smallest: sets of fewer texts are not kept.
        warn: is told, once, that the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit: int = LIMIT,
        smallest: int = SMALLEST,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.folder, self.limit, self.smallest, self.warn = folder, limit, smallest, warn
        self.hits = 0
        self.misses = 0
        self.writable = True  # until found otherwise

    @classmethod
    def from_environment(cls, warn: Callable[[str], object] = warnings.warn) -> TokenCache | None:
        """The cache of this machine, `MINBERT_HOME`/tokens; `MINBERT_TOKEN_CACHE` is its size, such as 2G, or off."""
        limit = _size(os.environ.get("MINBERT_TOKEN_CACHE", ""))
        return cls(home() / "tokens", limit=limit, warn=warn) if limit else None

    def encode(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        max_tokens: int,
        weights: Mapping[str, float] | None = None,
    ) -> Tokens:
        """What `tokenizer.encode` gives."""
        if len(texts) < self.smallest:
            return tokenizer.encode(texts, pairs, max_tokens=max_tokens, weights=weights)
        columns = [texts] if pairs is None else [texts, pairs]
        place = self.folder / _key(tokenizer, columns, max_tokens, weights)
        found = _load(place)
        if found is not None:
            self.hits += 1
            return found
        self.misses += 1
        tokens = tokenizer.encode(texts, pairs, max_tokens=max_tokens, weights=weights)
        if self.writable:
            try:
                self._store(place, tokens)
            except OSError as error:
                self.writable = False
                self.warn(f"the token cache {self.folder} cannot be written ({error}); going on without it")
        return tokens

    def entries(self) -> list[Entry]:
        """What is there, the one that was not used for longest first."""
        found = []
        for folder in _subfolders(self.folder, r"[0-9a-f]{64}"):
            with suppress(OSError):  # another process may be removing it
                size = sum(file.stat().st_size for file in folder.iterdir())
                meta = folder / "meta.json"
                found.append(Entry(folder, size, (meta if meta.exists() else folder).stat().st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def clear(self) -> int:
        """Remove every entry; returns how many bytes that freed."""
        return self._make_room(self.limit)

    def _store(self, place: Path, tokens: Tokens) -> None:
        """Written under another name and renamed when whole: nobody ever writes into a file that others have mapped.

        Nothing is forced to the disk: what a power failure leaves half-written does not pass its checksum.
        """
        kinds = ARRAYS if tokens.weights is None else ARRAYS | WEIGHTS
        arrays = {name: np.ascontiguousarray(getattr(tokens, name), kind) for name, kind in kinds.items()}
        size = sum(array.nbytes for array in arrays.values())
        if size > self.limit:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_room(size)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".new-", ignore_cleanup_errors=True) as made:
            new = Path(made) / "entry"
            new.mkdir()
            for name, array in arrays.items():
                np.save(new / f"{name}.npy", array)
            cut = tokens.truncation
            about = {
                "truncated": {"texts": cut.texts, "tokens": cut.tokens},
                "sha256": {name: _sha256(new / f"{name}.npy") for name in arrays},
            }
            (new / "meta.json").write_text(json.dumps({**about, "own": _own(about)}), encoding="utf-8")
            with suppress(FileNotFoundError):
                place.rename(Path(made) / "old")  # a damaged one
            try:
                new.rename(place)
            except OSError:
                if not place.exists():  # otherwise another process was faster, with the same tokens
                    raise

    def _make_room(self, size: int) -> int:
        """Remove entries until so many bytes are free, and what writers that died left behind."""
        for folder in _subfolders(self.folder, r"\.new-.*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > LEFTOVER:
                    shutil.rmtree(folder, ignore_errors=True)
        entries = self.entries()
        taken, freed = sum(entry.bytes for entry in entries), 0
        for entry in entries:
            if taken - freed + size <= self.limit:
                break
            # First out of sight, as a whole, so that no reader finds half of it
            with (
                suppress(OSError),
                tempfile.TemporaryDirectory(dir=self.folder, prefix=".new-", ignore_cleanup_errors=True) as gone,
            ):
                entry.folder.rename(Path(gone) / "old")
                freed += entry.bytes
        return freed


def _key(
    tokenizer: Tokenizer,
    columns: Sequence[Sequence[str]],
    max_tokens: int,
    weights: Mapping[str, float] | None = None,
) -> str:
    """A hash of everything that decides the tokens: the tokenizer, the texts in their order, the limit, the weights."""
    rules: list[Any] = [FORMAT, tokenizers.__version__, tokenizer.rules, max_tokens, len(columns)]
    if weights is not None:  # without them, the keys that there were before weights
        rules.append([sorted(weights.items()), tagger()])
    digest = hashlib.sha256(json.dumps(rules).encode())
    for column in columns:
        # All texts at once, which is fast; their lengths say where one ends and the next begins
        lengths = np.fromiter(map(len, column), np.int64, len(column))
        digest.update(len(column).to_bytes(8, "little"))
        digest.update(lengths.astype("<i8").tobytes())
        digest.update("".join(column).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _load(place: Path) -> Tokens | None:
    """The entry if it is there and whole. Every byte is checked, which costs a fraction of tokenizing."""
    try:
        meta: dict[str, Any] = json.loads((place / "meta.json").read_text(encoding="utf-8"))
        about = {name: meta[name] for name in ("truncated", "sha256")}
        if meta["own"] != _own(about):
            return None
        names = [*ARRAYS, *(name for name in WEIGHTS if name in about["sha256"])]
        if any(_sha256(place / f"{name}.npy") != about["sha256"][name] for name in names):
            return None
        # Copy on write: to whoever has them these are arrays like any others, and no change reaches the file
        ids, segments, offsets, *weights = (np.asarray(np.load(place / f"{name}.npy", mmap_mode="c")) for name in names)
        with suppress(OSError):  # a cache that can only be read is good, too
            os.utime(place / "meta.json")
        return Tokens(ids, segments, offsets, Truncation(**about["truncated"]), weights[0] if weights else None)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _own(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _subfolders(folder: Path, pattern: str) -> Iterator[Path]:
    """Those with a name of ours; none where the folder is not there."""
    try:
        yield from (path for path in sorted(folder.iterdir()) if re.fullmatch(pattern, path.name) and path.is_dir())
    except OSError:
        return


def _size(text: str) -> int:
    """Bytes that "2G", "500 MB" or "off" mean; nothing means the default."""
    text = text.strip()
    if not text:
        return LIMIT
    if text.lower() == "off":
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if not found:
        raise MinbertError(f'MINBERT_TOKEN_CACHE is "{text}"; expected a size such as 2G, or off')
    return int(float(found[1]) * UNITS[found[2].upper()])
