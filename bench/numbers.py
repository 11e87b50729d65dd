"""Write the numbers of results/ into README.md and docs/, so that none is typed by hand.

    python -m bench.numbers            # rewrite the marked blocks
    python -m bench.numbers --check    # exit 1 if one is out of date

A block stands between `<!-- numbers:NAME -->` and `<!-- /numbers -->`; NAME is a function below.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- numbers:([a-z-]+) -->\n)(.*?)(<!-- /numbers -->)", re.DOTALL)


def load(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))


def speed() -> str:
    embed, optimizer = load("bench/embed.json"), load("bench/optimizers.json")
    rows = [
        ("embedding, fp32, minilm, sentences/s", "sentence-transformers", embed["ratio"]),
        ("AdamW step, minilm's parameters, steps/s", "torch.optim.AdamW(foreach=True)", optimizer["ratio"]),
        ("the same", "torch.optim.AdamW(fused=True), one compiled kernel", optimizer["ratio_to_fused"]),
    ]
    head = f"| in one run, on a CPU, {embed['threads']} threads | peer | ours / peer |"
    lines = [head, "|---|---|---|", *(f"| {what} | {peer} | **{ratio:.2f}x** |" for what, peer, ratio in rows)]
    texts = f"{embed['texts']:,} {embed['source']}"
    return "\n".join(
        [*lines, "", f"Embedding: {texts}; same weights, vectors equal within {embed['max_difference']:.0e}.", ""]
    )


def six_epochs() -> str:
    """The runs of results/lab: mean over seeds of each score."""
    lines = ["| 6 epochs, 3 seeds | mean | lowest, highest | SST | Quora | STS |", "|---|---|---|---|---|---|"]
    for name, stem in (("linear heads", "multitask-6epochs"), ("PH heads", "multitask-6epochs-ph")):
        runs = [load(f"lab/{stem}-seed{seed}.json") for seed in (1, 2, 3)]
        overall = [run["overall"]["2023"] for run in runs]
        scores = [
            statistics.mean(run["dev"][task]["metrics"][run["dev"][task]["metric"]]["value"] for run in runs)
            for task in ("sst", "quora", "sts")
        ]
        cells = " | ".join(f"{score:.3f}" for score in scores)
        lines.append(f"| {name} | {statistics.mean(overall):.4f} | {min(overall):.4f}, {max(overall):.4f} | {cells} |")
    return "\n".join([*lines, ""])


def parity() -> str:
    lines = ["| encoder | hidden states | pooler | gradients (relative) |", "|---|---|---|---|"]
    for name, row in load("parity.json")["encoders"].items():
        lines.append(f"| {name} | {row['hidden']:.0e} | {row['pooler']:.0e} | {row['gradient']:.0e} |")
    return "\n".join([*lines, ""])


BLOCKS: dict[str, Callable[[], str]] = {"speed": speed, "parity": parity, "six-epochs": six_epochs}


def main() -> None:
    check, stale = "--check" in sys.argv, []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        fresh = BLOCK.sub(lambda match: match[1] + BLOCKS[match[2]]() + match[4], text)
        if fresh != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(fresh, encoding="utf-8")
    print(("out of date: " if check else "rewritten: ") + ", ".join(stale) if stale else "all numbers are up to date")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
