"""Write the numbers of results/ into README.md and docs/, so that none is typed by hand.

    python -m bench.numbers            # rewrite the marked blocks
    python -m bench.numbers --check    # exit 1 if one is out of date

A block stands between `<!-- numbers:NAME -->` and `<!-- /numbers -->`; NAME is a function below.
"""

from __future__ import annotations

import json
import re
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
        ("embedding, fp32, minilm, sentences/s", "sentence-transformers", embed),
        ("AdamW step, minilm's parameters, steps/s", "torch.optim.AdamW(foreach=True)", optimizer),
    ]
    head = f"| in one run, on a CPU, {embed['threads']} threads | peer | ours / peer |"
    lines = [head, "|---|---|---|"]
    lines += [f"| {what} | {peer} | **{found['ratio']:.2f}x** |" for what, peer, found in rows]
    texts = f"{embed['texts']:,} {embed['source']}"
    return "\n".join(
        [*lines, "", f"Embedding: {texts}; same weights, vectors equal within {embed['max_difference']:.0e}.", ""]
    )


def parity() -> str:
    lines = ["| encoder | hidden states | pooler | gradients (relative) |", "|---|---|---|---|"]
    for name, row in load("parity.json")["encoders"].items():
        lines.append(f"| {name} | {row['hidden']:.0e} | {row['pooler']:.0e} | {row['gradient']:.0e} |")
    return "\n".join([*lines, ""])


BLOCKS: dict[str, Callable[[], str]] = {"speed": speed, "parity": parity}


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
