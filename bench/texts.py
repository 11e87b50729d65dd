"""The texts that benchmarks run on: real ones where they are, otherwise the embedded sample's."""

from __future__ import annotations

import os
from pathlib import Path

from minbert.config import SAMPLE
from minbert.data.raw import read_split
from minbert.tasks import BUILT_IN


def sentences(count: int, data: Path | None = None) -> tuple[list[str], str]:
    """So many distinct sentences in a fixed order, and where they are from; `data` replaces $SHARED/data."""
    folder = data or Path(os.environ.get("SHARED", "../shared")) / "data"
    if (folder / "cs224n").is_dir():
        found: list[str] = []
        for name in ("sst", "sts", "quora"):
            examples = read_split(BUILT_IN[name], "dev", folder)
            found += [*examples.texts, *(examples.pairs or [])]
        distinct = list(dict.fromkeys(found))
        step = max(1, len(distinct) // count)
        return distinct[::step][:count], "dev sentences of SST, STS and Quora"
    rows = [
        line.split("\t")[1:-1] for path in sorted(SAMPLE.glob("*.tsv")) for line in path.read_text().splitlines()[1:]
    ]
    distinct = list(dict.fromkeys(text for row in rows for text in row))
    return (distinct * (count // len(distinct) + 1))[:count], "the embedded sample, repeated"
