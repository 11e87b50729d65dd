"""An exported model.onnx, run as anyone would run it: tokenizer.json, a padded batch, one call.

    model = OnnxModel(folder / "model.onnx", manifest)
    model.run(encodings, pairs)                        # every output, of one padded batch
    model.encode(tokens, ["mean"])["mean"]             # many sequences, each core on batches of its own
    model.answer("sts", [first, second])               # a head's outputs, from vectors

No torch. `minbert.delivery.onnx_heads` writes the file and says what its inputs and outputs are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from minbert.data.batches import pad, plan_batches
from minbert.errors import MinbertError, shown
from minbert.machine import available_cores

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minbert.data.tokenizer import Tokens
    from minbert.model.encoder import Pooling

FORMAT = 1
MANIFEST, MODEL = "manifest.json", "model.onnx"
TOKEN_BUDGET = 256  # of a batch, as in onnx_encoder
ROWS = 4096  # that a head answers at once


class OnnxModel:
    """The file, opened. It can be pickled, and used from several threads.

    Args:
        file: model.onnx, or its bytes.
        manifest: what manifest.json holds.
        threads: how many batches are computed at once; default the cores that are really ours.
        optimize: let ONNX Runtime fuse what it will, as a session of its own defaults does; slower for this graph.
    """

    def __init__(
        self, file: Path | bytes, manifest: Mapping[str, Any], *, threads: int | None = None, optimize: bool = False
    ) -> None:
        self._file, self.manifest = file, dict(manifest)
        self.threads = threads or available_cores()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        if not optimize:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                file if isinstance(file, bytes) else str(file), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the library raises classes of its own that share none with each other
            where = "the ONNX file" if isinstance(file, bytes) else shown(file)
            raise MinbertError(f"{where}: ONNX Runtime cannot open it ({str(error).splitlines()[0]})") from None
        self.width: int = manifest["width"]

    def encode(
        self, tokens: Tokens, poolings: Iterable[Pooling], *, progress: Callable[[int], None] | None = None
    ) -> dict[Pooling, NDArray[np.float32]]:
        """Each sequence encoded once and pooled in every way asked for, (sequences, width), in the sequences' order."""
        wanted = list(poolings)
        for how in wanted:
            if how not in self.manifest["embeddings"]:
                raise MinbertError(f'pooling is "{how}"; this file has: {", ".join(self.manifest["embeddings"])}')
        names = [self.manifest["embeddings"][how]["output"] for how in wanted]
        pooled: dict[Pooling, NDArray[np.float32]] = {
            how: np.empty((len(tokens), self.width), np.float32) for how in wanted
        }
        fair = -(-int(tokens.lengths.sum()) // self.threads)
        plan = plan_batches(tokens.lengths, tokens=max(1, min(TOKEN_BUDGET, fair)))

        def run(rows: NDArray[np.int64]) -> int:
            batch = pad(tokens, rows, self.manifest["pad_id"])
            feed = {
                "input_ids": batch.ids,
                "attention_mask": batch.mask.astype(np.int64),
                "token_type_ids": batch.segments,
            }
            for how, vectors in zip(wanted, self._run(names, feed), strict=True):
                pooled[how][rows] = vectors
            return len(rows)

        with ThreadPoolExecutor(max(1, min(self.threads, len(plan)))) as pool:
            for count in pool.map(run, plan):
                if progress is not None:
                    progress(count)
        return pooled

    def answer(self, task: str, views: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """A head's outputs, (rows, outputs), from the pooled vectors of the views that it reads."""
        about = self.manifest["tasks"][task]
        # ONNX Runtime computes the heads of other poolings too, which then need as many vectors.
        known = [entry["known"] for entry in self.manifest["embeddings"].values()]
        nothing = np.full((1, 1), self.manifest["pad_id"], np.int64)  # a batch needs a sequence, which nobody reads
        feed: dict[str, Any] = {
            "input_ids": nothing,
            "attention_mask": np.ones_like(nothing),
            "token_type_ids": np.zeros_like(nothing),
        }
        found = []
        for start in range(0, len(views[0]), ROWS):
            parts = [view[start : start + ROWS] for view in views]
            rows = np.arange(len(parts[0]), dtype=np.int64)
            feed |= dict.fromkeys(known, np.concatenate(parts))
            if len(views) == 2:
                feed["pairs"] = np.stack([rows + 1, rows + 1 + len(rows)], axis=1)
            (outputs,) = self._run([about["output"]], feed)
            found.append(outputs if len(views) == 2 else outputs[1:])
        return np.concatenate(found) if found else np.empty((0, about["outputs"]), np.float32)

    def run(self, encodings: Sequence[Any], pairs: NDArray[np.int64] | None = None) -> dict[str, NDArray[np.float32]]:
        """Every output for one padded batch of the tokenizers library, just as a script without minbert has them."""
        feed = {
            "input_ids": np.array([row.ids for row in encodings], np.int64),
            "attention_mask": np.array([row.attention_mask for row in encodings], np.int64),
            "token_type_ids": np.array([row.type_ids for row in encodings], np.int64),
        }
        if pairs is not None:
            feed["pairs"] = pairs
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, feed), strict=True))

    def _run(self, names: list[str], feed: Mapping[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
        found: list[NDArray[np.float32]] = self._session.run(names, dict(feed))
        return found

    def __getstate__(self) -> dict[str, Any]:
        file = self._file if isinstance(self._file, bytes) else self._file.read_bytes()
        return {"file": file, "manifest": self.manifest, "threads": self.threads}

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
