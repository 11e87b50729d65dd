"""Embedding on this CPU: ours and sentence-transformers, same weights, same texts, same threads, in one run.

python -m bench.embed                 # writes results/bench/embed.json
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.texts import sentences
from minbert.delivery.embedder import Embedder
from minbert.encoders import find_encoder
from minbert.evaluation.results import commit


def peer(folder: Path) -> Any:
    """sentence-transformers with mean pooling over the same weights, as its documentation sets it up."""
    logging.disable(logging.WARNING)
    from sentence_transformers import SentenceTransformer, models

    words = models.Transformer(str(folder))
    pooling = models.Pooling(Embedder.load(folder).width, pooling_mode="mean")
    return SentenceTransformer(modules=[words, pooling], device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/bench/embed.json"))
    arguments = parser.parse_args()
    folder = find_encoder("minilm")
    texts, source = sentences(arguments.count)
    ours, theirs = Embedder.load(folder), peer(folder)
    ways: dict[str, Callable[[list[str]], Any]] = {
        "minbert": ours.embed,
        "sentence-transformers": lambda batch: theirs.encode(batch, batch_size=32, show_progress_bar=False),
    }
    vectors = {name: way(texts[:256]) for name, way in ways.items()}  # warm-up, and: the same vectors?
    difference = float(np.abs(vectors["minbert"] - vectors["sentence-transformers"]).max())
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds):  # interleaved, so that a busy moment of the machine hits both
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            started = time.perf_counter()
            ways[name](texts)
            rates[name].append(len(texts) / (time.perf_counter() - started))
            print(f"round {number + 1}  {name:22} {rates[name][-1]:8.0f} texts/s", flush=True)
    median = {name: statistics.median(found) for name, found in rates.items()}
    content = {
        "figure": "CPU encoding, fp32, minilm, sentences/s",
        "ours": median["minbert"],
        "peer": median["sentence-transformers"],
        "ratio": median["minbert"] / median["sentence-transformers"],
        "unit": "sentences/s",
        "target": 1.0,
        "rounds": rates,
        "texts": len(texts),
        "source": source,
        "max_difference": difference,
        "threads": torch.get_num_threads(),
        "device": platform.processor() or platform.machine(),
        "commit": commit(),
        "command": "python -m bench.embed",
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"ours / sentence-transformers: {content['ratio']:.2f}  (largest difference {difference:.1e})")


if __name__ == "__main__":
    main()
