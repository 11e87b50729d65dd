"""An encoder in ONNX Runtime: the file that `onnx_graph` writes, run without torch.

    encoder = OnnxEncoder.of_folder(find_encoder("minilm"), precision="int8")
    encoder.encode(tokens, ["mean"])["mean"]                # (sequences, width), in the sequences' order

Batches are small enough for a core's own cache, and each core works on batches of its own: a product that two cores
share makes them wait for each other, and the parts between the products would be done by one of them. What else is in a
batch does not change a vector in int8, whose ranges are fixed (in fp32 by some 1e-7); where a CPU's kernels would make padding
matter, sequences of different lengths do not share a batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime

from minbert.config import SAMPLE
from minbert.data.batches import Padded, pad, plan_batches
from minbert.data.tokenizer import Tokenizer, Tokens
from minbert.encoders import WEIGHTS, home
from minbert.errors import MinbertError, require, shown
from minbert.machine import available_cores

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minbert.model.encoder import Pooling

Precision = Literal["fp32", "int8"]

TOKEN_BUDGET = 256  # of a batch: its widest activations fit a core's second-level cache
CALIBRATION = 200  # sentences of the embedded sample
ODD = ("", "a", ".", "?!", "\u00e9\u4f60\u0434", "0" * 50, "the " * 60)  # texts unlike those
TRIED = (3, 14, 27, 45, 70)  # tokens of the sequences that padding is tried with
LAST_BIT = 1e-5  # the pooler's product is added up in another order for one row than for several, padded or not
REVISION = 7  # of what onnx_graph writes: a file of another is not used


class OnnxEncoder:
    """A file of `onnx_graph.write_onnx`, opened. It can be pickled, and used from several threads.

    Args:
        file: the file, or its bytes.
        threads: how many batches are computed at once; default the cores that are really ours.
        optimize: let ONNX Runtime fuse what it will, as a session of its own defaults does; slower for this graph.
    """

    def __init__(self, file: Path | bytes, *, threads: int | None = None, optimize: bool = False) -> None:
        self._file = file
        self.threads = threads or available_cores()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # run() computes in the thread that calls it
        if not optimize:  # further fusions would bring SkipLayerNormalization back, the slowest of all
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.log_severity_level = 3
        where = "the ONNX file" if isinstance(file, bytes) else shown(file)
        try:
            self._session = onnxruntime.InferenceSession(
                file if isinstance(file, bytes) else str(file), options, providers=["CPUExecutionProvider"]
            )
            about = json.loads(self._session.get_modelmeta().custom_metadata_map["minbert"])
        except KeyError:
            raise MinbertError(f"{where}: not written by minbert; expected an encoder that it exported") from None
        except Exception as error:  # the library raises classes of its own that share none with each other
            raise MinbertError(f"{where}: ONNX Runtime cannot open it ({str(error).splitlines()[0]})") from None
        self.precision: Precision = about["precision"]
        self.width: int = about["width"]
        self.vocab_size: int = about["vocab_size"]
        self.max_tokens: int = about["max_tokens"]
        self.pad_id: int = about["pad_id"]
        self._inputs = {entry.name for entry in self._session.get_inputs()}
        self._outputs: dict[Pooling, str] = {output.name: output.name for output in self._session.get_outputs()}

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        return tuple(self._outputs)

    @classmethod
    def of_folder(cls, folder: Path, *, precision: Precision = "fp32", threads: int | None = None) -> OnnxEncoder:
        """An encoder's folder in Hugging Face layout. Its file is built once and kept in MINBERT_HOME/onnx."""
        return cls(onnx_file(folder, precision), threads=threads)

    def encode(
        self, tokens: Tokens, poolings: Iterable[Pooling], *, progress: Callable[[int], None] | None = None
    ) -> dict[Pooling, NDArray[np.float32]]:
        """Each sequence encoded once and pooled in every way asked for, (sequences, width), in the sequences' order."""
        names = list(poolings)
        self._check(tokens, names)
        pooled: dict[Pooling, NDArray[np.float32]] = {
            how: np.empty((len(tokens), self.width), np.float32) for how in names
        }
        plan = self._plan(tokens.lengths)

        def run(rows: NDArray[np.int64]) -> int:
            found = self._run([self._outputs[how] for how in names], self._feed(pad(tokens, rows, self.pad_id)))
            for how, vectors in zip(names, found, strict=True):
                pooled[how][rows] = vectors
            return len(rows)

        if min(self.threads, len(plan)) <= 1:
            for rows in plan:
                self._tell(progress, run(rows))
            return pooled
        with ThreadPoolExecutor(min(self.threads, len(plan))) as pool:
            for count in pool.map(run, plan):
                self._tell(progress, count)
        return pooled

    def use_threads(self, threads: int) -> None:
        self.threads = threads

    def _plan(self, lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Rows to batches; where padding would change a vector, only rows of the same length together."""
        fair = -(-int(lengths.sum()) // self.threads)  # few sequences are shared out too
        budget = max(1, min(TOKEN_BUDGET, fair))
        if len(lengths) < 2 or self._may_pad:
            return plan_batches(lengths, tokens=budget)
        alike = [np.flatnonzero(lengths == length) for length in np.unique(lengths)[::-1]]
        return [group[rows] for group in alike for rows in plan_batches(lengths[group], tokens=budget)]

    @cached_property
    def _may_pad(self) -> bool:
        """Whether padding leaves a sequence's vector as it is on this machine. In int8 the last bit of a softmax, which goes
        over a padded row, could turn a rounding; whether it does depends on the CPU's kernels. So it is tried, once.
        """
        if self.precision == "fp32":
            return True
        lengths = [length for length in TRIED if length <= self.max_tokens]
        ids = np.arange(sum(lengths)) * 7919 % self.vocab_size  # a large prime: from all over the vocabulary
        tokens = Tokens(ids.astype(np.int32), np.zeros(len(ids), np.uint8), np.cumsum([0, *lengths]))

        def vectors(rows: NDArray[np.int64]) -> list[NDArray[np.float32]]:
            return self._run(list(self._outputs.values()), self._feed(pad(tokens, rows, self.pad_id)))

        together, alone = vectors(np.arange(len(lengths))), [vectors(np.array([row])) for row in range(len(lengths))]
        return all(
            np.abs(found[row] - one[0]).max() <= (LAST_BIT if how == "pooler" else 0)
            for row, own in enumerate(alone)
            for how, found, one in zip(self._outputs, together, own, strict=True)
        )

    def _feed(self, batch: Padded) -> dict[str, NDArray[Any]]:
        feed: dict[str, NDArray[Any]] = {"ids": batch.ids, "mask": batch.mask, "segments": batch.segments}
        return {name: feed[name] for name in self._inputs}

    def _run(self, outputs: list[str], feed: dict[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
        options = onnxruntime.RunOptions()
        options.only_execute_path_to_fetches = True
        found: list[NDArray[np.float32]] = self._session.run(outputs, feed, options)
        return found

    @staticmethod
    def _tell(progress: Callable[[int], None] | None, count: int) -> None:
        if progress is not None:
            progress(count)

    def _check(self, tokens: Tokens, poolings: list[Pooling]) -> None:
        for how in poolings:
            if how not in self.poolings:
                raise MinbertError(f'pooling is "{how}"; this encoder has: {", ".join(self.poolings)}')
        if len(tokens) == 0:
            return
        shortest, longest = int(tokens.lengths.min()), int(tokens.lengths.max())
        if shortest < 1 or longest > self.max_tokens:
            wrong = shortest if shortest < 1 else longest
            raise MinbertError(f"a sequence of {wrong} tokens; this encoder takes 1 to {self.max_tokens}")
        low, high = int(tokens.ids.min()), int(tokens.ids.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise MinbertError(f"token id {wrong}; expected 0 to {self.vocab_size - 1} (the vocabulary)")

    def __getstate__(self) -> dict[str, Any]:
        """The file's bytes: where it is opened again, the file itself may not be."""
        return {
            "file": self._file if isinstance(self._file, bytes) else self._file.read_bytes(),
            "threads": self.threads,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["file"], threads=state["threads"])  # type: ignore[misc]


def onnx_file(folder: Path, precision: Precision) -> Path:
    """The file of an encoder's folder in the cache, built there if need be."""
    path = home() / "onnx" / f"{_fingerprint(folder, precision)}.onnx"
    if path.exists():
        return path
    feature = f"running an encoder in ONNX Runtime ({precision}) for the first time"
    for module, extra in (("torch", "train"), ("safetensors", "train"), ("onnx", "export")):
        require(module, extra, feature)
    from minbert.delivery.onnx_graph import write_onnx
    from minbert.model.encoder import POOLINGS
    from minbert.model.pretrained import load_folder

    encoder, report = load_folder(folder)
    poolings = [how for how in POOLINGS if how != "pooler" or not report.initialised]
    tokens = calibration_tokens(Tokenizer.load(folder)) if precision == "int8" else None
    try:
        write_onnx(encoder.eval(), path, precision=precision, poolings=poolings, calibration=tokens)
    except OSError as error:
        raise MinbertError(f"{shown(path)}: cannot be written ({error.strerror})") from None
    return path


def _fingerprint(folder: Path, precision: Precision) -> str:
    """Of everything that the file depends on."""
    digest = hashlib.sha256(f"{REVISION} {precision} ".encode())
    names = ["config.json", *WEIGHTS, *(("tokenizer.json", "vocab.txt") if precision == "int8" else ())]
    for path in (folder / name for name in names):
        if path.exists():
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:24]


def calibration_tokens(tokenizer: Tokenizer, max_tokens: int | None = None) -> Tokens:
    """What the ranges of int8 are measured with: sentences of the embedded sample, alone and in pairs, and odd ones."""
    texts = sample_texts()[:CALIBRATION]
    alone = tokenizer.encode([*texts, *ODD], max_tokens=max_tokens)
    return Tokens.join([alone, tokenizer.encode(texts[::4], texts[1::4], max_tokens=max_tokens)])


def sample_texts() -> list[str]:
    """The embedded sample's sentences, each once: a few of every task."""
    files = [path.read_text(encoding="utf-8").splitlines()[1:] for path in sorted(SAMPLE.glob("*.tsv"))]
    rows = [line.split("\t") for lines in zip(*files, strict=False) for line in lines]
    return list(dict.fromkeys(text for row in rows for text in row[1:-1]))
