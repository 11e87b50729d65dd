"""An exported model.onnx: the encoder, every pooling and all heads in one file, run by ONNX Runtime. No torch.

    model, tokenizer, manifest = open_export(Path("sample-onnx"))
    model.encode(tokens, ["mean"])["mean"]             # many sequences, each core on batches of its own
    model.answer({"sts": [first, second]})["sts"]      # heads' outputs, from vectors
    model.run(encodings, pairs)                        # every output of one padded batch, as anyone would ask for it

`minbert.delivery.onnx_heads` writes the file and says what its inputs and outputs are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minbert.data.tokenizer import Tokenizer
from minbert.delivery.onnx_encoder import OnnxEncoder
from minbert.delivery.onnx_names import IDS, MASK, PAIRS, SEGMENTS
from minbert.errors import MinbertError, shown
from minbert.model.manifest import Manifest, from_plain, read_manifest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minbert.data.batches import Padded
    from minbert.data.inputs import Inputs

FORMAT = 3
MANIFEST, MODEL = "manifest.json", "model.onnx"
ROWS = 4096  # that a head answers at once


class OnnxModel(OnnxEncoder):
    """The file, opened: the backend `onnx`, an encoder with heads. It can be pickled, and used from several threads.

    Args:
        file: model.onnx, or its bytes.
        manifest: what manifest.json holds.
        threads, optimize: see `OnnxEncoder`.
    """

    def __init__(
        self, file: Path | bytes, manifest: Mapping[str, Any], *, threads: int | None = None, optimize: bool = False
    ) -> None:
        super().__init__(file, threads=threads, optimize=optimize)
        self.manifest = dict(manifest)
        self._outputs = {how: entry["output"] for how, entry in manifest["embeddings"].items()}

    def answer(self, views: Mapping[str, Sequence[NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
        """Heads' outputs, (rows, outputs) by task, from the pooled vectors of the views that each reads."""
        if sum(len(parts[0]) for parts in views.values()) <= ROWS:
            return self._answer(views) if views else {}
        found: dict[str, list[NDArray[np.float32]]] = {task: [] for task in views}
        for task, parts in views.items():
            for start in range(0, max(1, len(parts[0])), ROWS):
                found[task].append(self._answer({task: [part[start : start + ROWS] for part in parts]})[task])
        return {task: np.concatenate(outputs) for task, outputs in found.items()}

    def _answer(self, views: Mapping[str, Sequence[NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
        """All in one run: it needs a sequence, which nobody reads and which costs more than all heads together."""
        nothing = np.full((1, 1), self.pad_id, np.int64)
        vectors: list[NDArray[np.float32]] = []
        pairs: list[NDArray[np.int64]] = []
        places: dict[str, slice] = {}
        start, paired = 1, 0  # the known vectors are numbered on from that sequence
        for task, parts in views.items():
            rows = np.arange(start, start + len(parts[0]), dtype=np.int64)
            if len(parts) == 2:
                pairs.append(np.stack([rows, rows + len(rows)], axis=1))
                places[task] = slice(paired, paired + len(rows))
                paired += len(rows)
            else:
                places[task] = slice(start, start + len(rows))
            vectors += parts
            start += len(parts) * len(rows)
        feed: dict[str, NDArray[Any]] = {IDS: nothing, MASK: np.ones_like(nothing), SEGMENTS: np.zeros_like(nothing)}
        for entry in self.manifest["embeddings"].values():  # every head computes, and needs as many vectors
            feed[entry["known"]] = np.concatenate(vectors)
        if pairs:
            feed[PAIRS] = np.concatenate(pairs)
        found = self._run([self.manifest["tasks"][task]["output"] for task in views], feed)
        return {task: outputs[places[task]] for task, outputs in zip(views, found, strict=True)}

    def outputs_of(self, inputs: Inputs) -> NDArray[np.float32]:
        """A task's outputs for a whole split that is tokenized already, (rows, outputs), in order."""
        task = inputs.task
        if task.is_masked:
            raise MinbertError(f'the masked task "{task.name}" is not in an export; expected the model it was made of')
        if task.is_contrastive:
            found = "gives answers, not the vectors that it compares"
            raise MinbertError(f"an export of {task.name} {found}; expected the model it was made of")
        how = self.manifest["tasks"][task.name]["pooling"]
        pooled = {view: self.encode(view, [how])[how] for view in dict.fromkeys(inputs.answer_views)}  # each once
        return self.answer({task.name: [pooled[view] for view in inputs.answer_views]})[task.name]

    def run(self, encodings: Sequence[Any], pairs: NDArray[np.int64] | None = None) -> dict[str, NDArray[np.float32]]:
        """Every output for one padded batch of the tokenizers library, just as a script without minbert has them."""
        feed = {
            IDS: np.array([row.ids for row in encodings], np.int64),
            MASK: np.array([row.attention_mask for row in encodings], np.int64),
            SEGMENTS: np.array([row.type_ids for row in encodings], np.int64),
        }
        if pairs is not None:
            feed[PAIRS] = pairs
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, feed), strict=True))

    def _feed(self, batch: Padded) -> dict[str, NDArray[Any]]:
        return {IDS: batch.ids, MASK: batch.mask.astype(np.int64), SEGMENTS: batch.segments}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["file"], state["manifest"], threads=state["threads"])  # type: ignore[misc]


def is_export(folder: Path) -> bool:
    """Does the folder hold what `minbert export --to onnx` wrote?"""
    return (folder / MODEL).is_file() and (folder / MANIFEST).is_file()


def read_export(folder: Path) -> dict[str, Any]:
    """The manifest of an export, of a format that this minbert knows."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MinbertError(f"{shown(path)}: not readable JSON ({error}); expected an export's manifest") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise MinbertError(f"{shown(path)}: format {found!r}; this minbert reads format {FORMAT}: minbert export again")
    return raw


def open_export(
    folder: Path, *, device: str = "cpu", precision: str = "fp32", backend: str | None = None
) -> tuple[OnnxModel, Tokenizer, Manifest]:
    """An export's folder; it runs in ONNX Runtime, on the CPU, in the precision that it was written in."""
    raw = read_export(folder)
    where = shown(folder)
    if backend == "torch" or device not in ("cpu", "auto"):
        found = f'device "{device}"' if backend != "torch" else 'backend "torch"'
        raise MinbertError(f"{where}: an export, which runs in ONNX Runtime on the CPU, and {found}; expected cpu")
    if precision not in ("fp32", raw["precision"]):
        raise MinbertError(f'{where}: an export in {raw["precision"]}, and precision "{precision}"')
    manifest = from_plain(raw["model"], folder / MANIFEST)
    return OnnxModel(folder / MODEL, raw), Tokenizer.load(folder), manifest


def describe_folder(folder: Path) -> Manifest:
    """What a model folder, or an export's, says of the model; an error if it is neither."""
    return from_plain(read_export(folder)["model"], folder / MANIFEST) if is_export(folder) else read_manifest(folder)
