"""The table of goals: each figure with ours, the peer's, the goal, and whether it is reached.

python -m bench.summary               # reads results/bench/*.json, writes results/bench/summary.json

Nothing is measured here. A figure whose file is missing, or was made by a quick run, is listed as not measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import save
from bench.settings import OUT

Content = Mapping[str, Any]
Pair = tuple[float, float]
"""Ours and the peer's."""


@dataclass(frozen=True)
class Goal:
    figure: str
    unit: str
    target: float
    file: str
    read: Callable[[Content], Pair]
    share: bool = False
    """The goal is what ours has to be, not its ratio to the peer's."""

    def entry(self, folder: Path) -> dict[str, Any]:
        content = load(folder, self.file)
        entry: dict[str, Any] = {
            "figure": self.figure,
            "ours": None,
            "peer": None,
            "unit": self.unit,
            "ratio": None,
            "target": self.target,
            "target_of": "ours" if self.share else "ratio",
            "device": None,
            "command": None,
            "reached": None,
        }
        try:
            if content is None:
                raise KeyError(self.file)
            ours, peer = self.read(content)
        except (KeyError, TypeError):
            return entry | {"note": (content or {}).get("not_measured") or "not measured"}
        environment = content.get("environment", {})
        return entry | {
            "ours": ours,
            "peer": peer,
            "ratio": ours / peer,
            "device": environment.get("device_name") or content.get("device"),
            "command": content.get("command"),
            "reached": (ours if self.share else ours / peer) >= self.target,
        }


def load(folder: Path, name: str) -> Content | None:
    """A part's file, unless it is missing or only shows that the part works."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    content: Content = json.loads(path.read_text(encoding="utf-8"))
    return None if content.get("quick") else content


def training(name: str) -> Callable[[Content], Pair]:
    """Rates of the median round; their ratio is that of the medians."""

    def read(content: Content) -> Pair:
        ours, peer = (content["models"][name][who]["examples_per_second"]["median"] for who in ("ours", "peer"))
        return ours, peer

    return read


def utilisation(found: Content) -> Pair:
    return found["ours"]["flops_utilisation"]["median"], found["peer"]["flops_utilisation"]["median"]


def best_utilisation(name: str) -> Callable[[Content], Pair]:
    return lambda content: max(map(utilisation, content["models"][name]["batches"].values()))


def encoding(ours: str, *peers: str) -> Callable[[Content], Pair]:
    """Sentences/s of one of our ways and of the fastest of the peers' (those that were there)."""

    def read(content: Content) -> Pair:
        ways = content["ways"]
        found = [ways[name]["sentences_per_second"]["median"] for name in peers if name in ways]
        if not found:
            raise KeyError(peers[0])
        return ways[ours]["sentences_per_second"]["median"], max(found)

    return read


GOALS = (
    Goal("GPU training, minilm, ours / plain Hugging Face loop", "examples/s", 10.0, "train-cuda", training("minilm")),
    Goal("GPU training, mpnet, ours / plain Hugging Face loop", "examples/s", 5.0, "train-cuda", training("mpnet")),
    *(
        Goal(
            f"GPU training, pairs, {name}, ours / sentence-transformers' trainer",
            "examples/s",
            2.0,
            "pairs-cuda",
            training(name),
        )
        for name in ("minilm", "mpnet")
    ),
    Goal(
        "GPU encoding, ours / sentence-transformers bf16",
        "sentences/s",
        2.0,
        "encode-cuda",
        encoding("minbert bf16", "sentence-transformers bf16"),
    ),
    Goal("CPU training, minilm, ours / plain Hugging Face loop", "examples/s", 1.5, "train-cpu", training("minilm")),
    Goal(
        "CPU encoding, ours int8 / sentence-transformers fp32",
        "sentences/s",
        3.0,
        "encode",
        encoding("minbert int8", "sentence-transformers fp32"),
    ),
    Goal(
        "CPU encoding, ours int8 / fastest int8 peer",
        "sentences/s",
        1.3,
        "encode",
        encoding("minbert int8", "sentence-transformers int8", "onnxruntime int8"),
    ),
    Goal(
        "GPU matrix utilisation, mpnet, at the best of 16 to 1024 texts a step",
        "of the measured matrix rate",
        0.40,
        "scaling-cuda",
        best_utilisation("mpnet"),
        share=True,
    ),
    Goal(
        "GPU matrix utilisation, mpnet, at 64 texts a step",
        "of the measured matrix rate",
        0.30,
        "train-cuda",
        lambda content: utilisation(content["models"]["mpnet"]),
        share=True,
    ),
)


def summarise(folder: Path) -> list[dict[str, Any]]:
    return [goal.entry(folder) for goal in GOALS]


def show(entries: list[dict[str, Any]]) -> str:
    """A table for the console."""
    lines = []
    for entry in entries:
        if entry["ours"] is None:
            lines.append(f"{entry['figure']:72} {entry['note']}")
            continue
        goal = f"{entry['target']:.0%}" if entry["target_of"] == "ours" else f"{entry['target']:g}x"
        found = f"{entry['ours']:.1%}" if entry["target_of"] == "ours" else f"{entry['ratio']:.2f}x"
        lines.append(f"{entry['figure']:72} {found:>8}  goal {goal:>5}  {'reached' if entry['reached'] else 'open'}")
    return "\n".join(lines)


def write(folder: Path) -> list[dict[str, Any]]:
    entries = summarise(folder)
    save(folder, "summary", entries)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files")
    print(show(write(parser.parse_args().out)))


if __name__ == "__main__":
    main()
