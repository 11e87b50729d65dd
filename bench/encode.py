"""Sentences to vectors: ours and the peers', the same weights, texts and threads, in one run.

    python -m bench.encode                    # writes results/bench/encode.json
    python -m bench.encode --device cuda      # writes results/bench/encode-cuda.json

On a CPU: ours in torch and in ONNX Runtime (fp32 and int8), sentence-transformers in fp32 and in int8 (its ONNX backend;
see bench/onnx_peers.py), and a plain ONNX Runtime session in int8. On a GPU: ours and sentence-transformers in fp32 and
bf16. Every way gets strings and returns vectors: tokenizing, sorting and pooling are part of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.measure import ratio, save, spread
from bench.settings import Settings, parser_of, settings_of
from bench.texts import sentences
from minbert.config import SAMPLE
from minbert.delivery.embedder import Embedder

COUNT = {"cuda": 20_000, "cpu": 4_000}
PARTS = {"cuda": 1, "cpu": 4}
"""A round encodes one of so many parts of the texts: turns that are short, where the machine's speed changes by the minute."""
ROUNDS = {"cuda": 5, "cpu": 20}
BATCH = {"cuda": 128, "cpu": 32}
"""Of sentence-transformers: its default, and on a GPU the size that its documentation speeds up with."""
Encode = Callable[[list[str]], Any]


def ways_on_cpu(folder: Path, work: Path) -> dict[str, Encode]:
    from onnxruntime.quantization import QuantType

    from bench import onnx_peers

    threads = torch.get_num_threads()
    exact, fast = (Embedder.load(folder, backend="onnx", precision=name) for name in ("fp32", "int8"))  # type: ignore[arg-type]
    for embedder in (exact, fast):
        embedder.encoder.threads = threads  # type: ignore[union-attr, assignment]
    exported = onnx_peers.export(folder, work / "exported.onnx")
    signed = onnx_peers.quantize(exported, work / "int8.onnx", QuantType.QInt8)
    unsigned = onnx_peers.quantize(exported, work / "uint8.onnx", QuantType.QUInt8)
    theirs, theirs_int8 = sentence_transformer(folder, "cpu"), sentence_transformer(folder, "cpu")
    theirs_int8[0].model = onnx_peers.SessionInside(theirs_int8[0].model, unsigned, threads)
    return {
        "minbert int8": fast.embed,
        "minbert fp32 (ONNX Runtime)": exact.embed,
        "minbert fp32": Embedder.load(folder).embed,
        "sentence-transformers fp32": encoding(theirs, "cpu"),
        "sentence-transformers int8": encoding(theirs_int8, "cpu"),
        "onnxruntime int8": onnx_peers.plain_session(signed, fast.tokenizer, threads),
    }


def ways_on_gpu(folder: Path) -> dict[str, Encode]:
    half = sentence_transformer(folder, "cuda").bfloat16()
    return {
        "minbert bf16": Embedder.load(folder, device="cuda", precision="bf16").embed,
        "minbert fp32": Embedder.load(folder, device="cuda").embed,
        "sentence-transformers bf16": encoding(half, "cuda"),
        "sentence-transformers fp32": encoding(sentence_transformer(folder, "cuda"), "cuda"),
    }


def sentence_transformer(folder: Path, device: str) -> Any:
    """sentence-transformers with mean pooling over the same weights, as its documentation sets it up."""
    logging.disable(logging.WARNING)
    from sentence_transformers import SentenceTransformer, models
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    words = models.Transformer(str(folder))
    pooling = models.Pooling(words.get_embedding_dimension(), pooling_mode="mean")
    return SentenceTransformer(modules=[words, pooling], device=device)


def encoding(model: Any, device: str) -> Encode:
    def encode(texts: list[str]) -> Any:
        return model.encode(texts, batch_size=BATCH[device], show_progress_bar=False)

    return encode


def cosines(found: Any, expected: Any) -> dict[str, float]:
    one, other = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    values = (one * other).sum(1) / (np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1))
    return {"mean": float(values.mean()), "min": float(values.min())}


def measure(settings: Settings) -> dict[str, Any]:
    device = settings.device.type
    model = settings.model("minilm")
    texts, source = sentences(64 if settings.quick else COUNT[device], settings.data or SAMPLE)
    ways = ways_on_gpu(model.folder) if device == "cuda" else ways_on_cpu(model.folder, settings.work)
    vectors = {name: way(texts[:512]) for name, way in ways.items()}  # to warm up, and: the same vectors?
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(settings.changes.get("rounds", 2 if settings.quick else ROUNDS[device])):
        part = texts[number % PARTS[device] :: PARTS[device]]
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:  # in turns: a busy moment of the machine hits all
            started = time.perf_counter()
            ways[name](part)
            rates[name].append(len(part) / (time.perf_counter() - started))
            print(f"round {number + 1}  {name:28} {rates[name][-1]:9.0f} sentences/s", flush=True)
    found = {
        name: {
            "sentences_per_second": spread(rates[name]),
            "cosine_to_fp32": cosines(vectors[name], vectors["minbert fp32"]),
        }
        for name in ways
    }
    content = {
        "figure": "sentences to vectors, minilm, mean pooling",
        "unit": "sentences/s",
        "texts": len(texts),
        "source": source,
        "threads": torch.get_num_threads(),
        "ways": found,
        "ratios": ratios(found),
        "max_difference": float(np.abs(vectors["minbert fp32"] - vectors["sentence-transformers fp32"]).max()),
        "model": {"name": "minilm", **model.about()},
        **settings.about(),
        "precision": "as each way's name says",
    }
    save(settings.out, "encode-cuda" if device == "cuda" else "encode", content)
    for name, times in content["ratios"].items():
        print(f"{name}: {times['median']:.2f} ({times['min']:.2f} to {times['max']:.2f})")
    return content


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Our fastest way to every other, and fp32 to fp32, of the medians; the spread is that of the rounds."""
    fastest = next(iter(found))
    pairs = [(fastest, name) for name in found if name != fastest]
    pairs.append(("minbert fp32", "sentence-transformers fp32"))
    rates = {name: row["sentences_per_second"] for name, row in found.items()}
    return {f"{one} / {other}": ratio(rates[one], rates[other]) for one, other in pairs}


def main() -> None:
    with settings_of(parser_of(__doc__).parse_args(), "encode") as settings:
        measure(settings)


if __name__ == "__main__":
    main()
