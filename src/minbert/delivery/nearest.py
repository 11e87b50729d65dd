"""The rows of a matrix that are nearest to some vectors: exactly, in blocks, or by a graph of faiss.

places = nearest(vectors, unit(asked), 10)         # (questions, 10), best first
scores, places = rank(vectors, unit(asked), places)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minbert.errors import require

BLOCK = 32_768  # sentences of a matrix product
QUESTIONS = 256  # of a matrix product
SAMPLE = 200  # sentences that the recall of a graph is measured with
NEIGHBOURS = 32  # of a sentence in the graph
BREADTH = 200  # of the search while the graph is built

Floats = NDArray[np.float32]


def unit(vectors: Floats) -> Floats:
    """Vectors of length 1; one of nothing but zeros stays."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)


def nearest(vectors: NDArray[np.floating], asked: Floats, count: int, *, block: int = BLOCK) -> NDArray[np.int64]:
    """Places of the rows with the largest products, (questions, count), best first.

    One block of rows is multiplied with the questions at a time; only its rows that beat the worst of the best so far
    are looked at, so that after a few blocks there is next to nothing to sort.
    """
    places = np.empty((len(asked), count), np.int64)
    for begin in range(0, len(asked), QUESTIONS):
        part = asked[begin : begin + QUESTIONS]
        scores = [np.empty(0, np.float32)] * len(part)
        found = [np.empty(0, np.int64)] * len(part)
        for start in range(0, len(vectors), block):
            products = np.asarray(vectors[start : start + block], np.float32) @ part.T  # (block, questions)
            for number, row in enumerate(np.ascontiguousarray(products.T)):
                full = len(scores[number]) == count
                better = np.flatnonzero(row > scores[number][-1]) if full else np.arange(len(row))
                if not len(better):
                    continue
                if len(better) > count:  # all that are at least as good as the last that can be among the best
                    limit = np.partition(row[better], len(better) - count)[len(better) - count]
                    better = better[row[better] >= limit]
                both = np.concatenate([scores[number], row[better]])
                order = np.argsort(-both, kind="stable")[:count]  # of equal ones the earlier
                scores[number] = both[order]
                found[number] = np.concatenate([found[number], start + better])[order]
        places[begin : begin + QUESTIONS] = found
    return places


def rank(
    vectors: NDArray[np.floating], asked: Floats, places: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Cosines in double precision, by which the found are sorted once more: equal vectors have equal scores then,
    whatever block they were in."""
    scores = np.full(places.shape, -np.inf)  # (questions, count)
    for number, (question, found) in enumerate(zip(asked.astype(np.float64), places, strict=True)):
        there = found >= 0
        scores[number, there] = np.clip(vectors[found[there]].astype(np.float64) @ question, -1, 1)
    order = np.lexsort((places, -scores))
    return np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)


def build_graph(vectors: Any, path: Path, rng: np.random.Generator) -> float:
    """Write a graph of the vectors; the part of the ten nearest that it finds, of some of the sentences."""
    faiss: Any = require("faiss", "search", "an index of kind hnsw")
    graph = faiss.IndexHNSWFlat(vectors.shape[1], NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = BREADTH
    for start in range(0, len(vectors), BLOCK):
        graph.add(np.ascontiguousarray(vectors[start : start + BLOCK], np.float32))
    faiss.write_index(graph, str(path))
    sample = np.sort(rng.permutation(len(vectors))[:SAMPLE])
    asked, count = np.asarray(vectors[sample], np.float32), min(11, len(vectors))  # its own, and ten
    exact, found = nearest(vectors, asked, count), ask_graph(graph, asked, count)
    hits = []
    for own, one, other in zip(sample.tolist(), exact.tolist(), found.tolist(), strict=True):
        wanted = set(one) - {own}  # which every graph finds
        hits.append(len(wanted & set(other)) / len(wanted) if wanted else 1.0)
    return float(np.mean(hits))


def ask_graph(graph: Any, asked: Floats, count: int) -> NDArray[np.int64]:
    faiss: Any = require("faiss", "search", "an index of kind hnsw")
    breadth = faiss.SearchParametersHNSW(efSearch=max(64, 4 * count))
    return graph.search(np.ascontiguousarray(asked), count, params=breadth)[1]
