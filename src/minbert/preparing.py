"""A recipe's files to token sequences, before anything is trained or scored: what was read, skipped, added and cut."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from minbert.config import Recipe
from minbert.data.cache import TokenCache
from minbert.data.inputs import Inputs, tokenize
from minbert.data.negatives import Nearest
from minbert.data.raw import Examples, fingerprint, read_split, resolve
from minbert.data.rows import fingerprint_of, training_rows
from minbert.data.tokenizer import Tokenizer
from minbert.errors import MinbertError, shown
from minbert.recipe_checks import lender
from minbert.tasks import Task


@dataclass(frozen=True, eq=False)
class Prepared:
    """The splits of a recipe, read and tokenized."""

    examples: Mapping[str, Mapping[str, Examples]]
    """By split and task."""
    inputs: Mapping[str, Mapping[str, Inputs]]

    def notes(self) -> dict[str, Any]:
        """What was read, skipped and cut: nothing is dropped silently."""
        return {
            split: {
                task: {
                    "rows": len(examples),
                    "skipped": dict(examples.skipped),
                    **_added(examples),
                    "truncated": {
                        "texts": self.inputs[split][task].truncation.texts,
                        "tokens": self.inputs[split][task].truncation.tokens,
                    },
                    "files": dict(examples.files),
                }
                for task, examples in tasks.items()
            }
            for split, tasks in self.examples.items()
        }


def _added(examples: Examples) -> dict[str, Any]:
    """Rows that are not the files' own, and what all of them are: a run goes on only with the very same."""
    return {"added": dict(examples.added), "sha256": fingerprint_of(examples)} if examples.added else {}


@runtime_checkable
class Preparing(Protocol):
    """A watcher that also wants to know what happens before the first step."""

    def preparing(self, what: str) -> None: ...
    def prepared(self, note: str) -> None: ...
    def warn(self, message: str) -> None: ...


class Unwatched:
    def preparing(self, what: str) -> None: ...
    def prepared(self, note: str) -> None: ...
    def warn(self, message: str) -> None:
        warnings.warn(message, stacklevel=2)


def prepare(
    recipe: Recipe,
    tokenizer: Tokenizer,
    folder: Path,
    splits: tuple[str, ...] = ("train", "dev"),
    *,
    cache: TokenCache | None = None,
    watcher: Preparing | None = None,
    nearest: Nearest | None = None,
) -> Prepared:
    """Read and tokenize the splits of every task; what the cache holds is not tokenized again.

    `nearest` finds hard negatives, for tasks that ask for them.
    """
    watcher = watcher or Unwatched()
    examples: dict[str, dict[str, Examples]] = {}
    inputs: dict[str, dict[str, Inputs]] = {}
    started, rows = time.perf_counter(), 0
    for split, task in _to_read(recipe, splits):
        watcher.preparing(f"reading {task.name} {split}")
        if split == "train":
            found = training_rows(recipe, task, folder, nearest=nearest)
        else:
            found = read_split(task, split, folder)  # type: ignore[arg-type]
        watcher.preparing(f"tokenizing {task.name} {split}, {len(found):,} rows")
        limit, seeds = recipe.model.max_tokens, {"seed": recipe.seed, "place": recipe.tasks.index(task)}
        weights = pooling_weights(recipe, task)
        tokens = tokenize(task, found, tokenizer, limit, cache=cache, weights=weights, **seeds)
        examples.setdefault(split, {})[task.name] = found
        inputs.setdefault(split, {})[task.name] = tokens
        rows += len(found)
    tried = cache.hits + cache.misses if cache else 0
    from_cache = f", {cache.hits} of {tried} sets of tokens from the cache" if cache and tried else ""
    watcher.prepared(f"{rows:,} rows prepared in {time.perf_counter() - started:.1f} s{from_cache}")
    return Prepared(examples, inputs)


def _to_read(recipe: Recipe, splits: tuple[str, ...]) -> Iterator[tuple[str, Task]]:
    """What of the recipe's files is read: its tasks' splits, but not the training rows of a task that has none to learn."""
    for split in splits:
        for task in recipe.tasks:
            if split == "train" and not task.trained and not task.train:
                continue
            if not getattr(task, split):
                raise MinbertError(f"[tasks.{task.name}] has no {split} files; expected them")
            yield split, task


def files_of(
    recipe: Recipe, folder: Path, splits: tuple[str, ...] = ("train", "dev")
) -> dict[tuple[str, str], list[Path]]:
    """The files that `prepare` reads, by split and task. What it says if one is not there, without reading any."""
    found = {}
    for split, task in _to_read(recipe, splits):
        found[split, task.name] = resolve(getattr(task, split), folder)
        if split == "train" and task.borrow is not None:
            found[split, task.name] += resolve(lender(recipe, task).train, folder)
    return found


def other_files(notes: Mapping[str, Any], recipe: Recipe, folder: Path) -> list[str]:
    """Which of the files that a recipe reads are not those of the notes. Files that are not there cannot be asked."""
    try:
        files = files_of(recipe, folder)
    except MinbertError:
        return []
    found = []
    for (split, task), paths in files.items():
        read = notes.get(split, {}).get(task, {}).get("files", {})
        digests = {Path(name).name: digest for name, digest in read.items()}  # of results wherever the files lay
        found += [f"{path.name} is another file" for path in paths if digests.get(path.name) != _digest(path)]
    return list(dict.fromkeys(found))


def _digest(path: Path) -> str:
    """Of the same files, asked again and again, once, unless they are written again."""
    status = path.stat()
    return _digest_then(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _digest_then(path: Path, _changed: int, _size: int) -> str:
    return fingerprint(path)


def pooling_weights(recipe: Recipe, task: Task) -> Mapping[str, float] | None:
    """By part of speech, where the task pools with them."""
    return recipe.model.pooling_weights if (task.pooling or recipe.model.pooling) == "weighted" else None


def train_sample_of(train_inputs: Mapping[str, Inputs], recipe: Recipe) -> dict[str, Inputs]:
    """The fixed training rows that are scored beside dev."""
    size = recipe.training.train_sample
    return _drawn(train_inputs, size, np.random.default_rng([recipe.seed, 3])) if size else {}


def dev_sample_of(dev_inputs: Mapping[str, Inputs], recipe: Recipe) -> dict[str, Inputs]:
    """The fixed dev rows that are scored while training."""
    size = recipe.training.dev_sample
    return _drawn(dev_inputs, size, np.random.default_rng([recipe.seed, 5])) if size else dict(dev_inputs)


def _drawn(splits: Mapping[str, Inputs], size: int, rng: np.random.Generator) -> dict[str, Inputs]:
    return {name: inputs.take(np.sort(rng.permutation(len(inputs))[:size])) for name, inputs in splits.items()}


def read_notes(folder: Path) -> dict[str, Any]:
    """What a run has read, from its data.json; nothing where there is none."""
    path = folder / "data.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def check_same_files(folder: Path, prepared: Prepared) -> None:
    """data.json remembers what was read; a run goes on only with the same bytes."""
    before = read_notes(folder)
    if not before:
        return
    for split, tasks in prepared.notes().items():
        for task, note in tasks.items():
            if list(note["files"].values()) != list(before[split][task]["files"].values()):
                raise MinbertError(f"{', '.join(note['files'])} ({task}, {split}) changed since the run was started")
            if note.get("sha256") != before[split][task].get("sha256"):
                raise MinbertError(
                    f"{task}, {split}: the rows drawn ({', '.join(note.get('added', {}))}) are others than those the run "
                    "was started with; expected the same encoder, on the same device"
                )


def check_still_there(folder: Path, recipe: Recipe, data: Path) -> None:
    """What a stage that is done has read is what it would read now."""
    notes = read_notes(folder)
    if notes and (changed := other_files(notes, recipe, data)):
        raise MinbertError(
            f"{shown(folder)}: {', '.join(changed)} than when the stage was trained; "
            "expected the same, or --overwrite to begin anew"
        )


def changed_files(prepared: Prepared) -> list[str]:
    files = {
        name: digest
        for tasks in prepared.examples.values()
        for found in tasks.values()
        for name, digest in found.files.items()
    }
    return [name for name, digest in files.items() if not Path(name).exists() or fingerprint(Path(name)) != digest]
