"""Write the numbers of results/ into README.md, docs/ and recipes/README.md, so that none is typed by hand.

    python -m bench.numbers            # rewrite the marked blocks
    python -m bench.numbers --check    # exit 1 if one is out of date

A block stands between `<!-- numbers:NAME -->` and `<!-- /numbers -->`; NAME is a row of BLOCKS below.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bench import lab, scores, tables
from minbert.reproduction.recipes import find_papers
from minbert.toml_tables import read_toml

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- numbers:([a-z0-9-]+) -->\n)(.*?)(<!-- /numbers -->)", re.DOTALL)


def parity() -> str:
    found = json.loads((ROOT / "results" / "parity.json").read_text(encoding="utf-8"))
    lines = ["| encoder | hidden states | pooler | gradients (relative) |", "|---|---|---|---|"]
    for name, row in found["encoders"].items():
        lines.append(f"| {name} | {row['hidden']:.0e} | {row['pooler']:.0e} | {row['gradient']:.0e} |")
    return "\n".join([*lines, ""])


def papers() -> str:
    """Every recipe of a paper, what it does and where it differs from the paper's text."""
    lines: list[str] = []
    for paper in find_papers(ROOT / "recipes").values():
        lines += [f"### {paper.claims.title if paper.claims.best else 'Beyond the papers'}", ""]
        lines += ["| recipe | what the paper calls it | what |", "|---|---|---|"]
        for row in paper.rows.values():
            about = read_toml(row.path)["about"].replace("|", "\\|")
            lines.append(f"| [{row.name}]({row.key}.toml) | {row.reported.row} | {about} |")
        lines.append("")
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "parity": parity,
    "six-epochs": lab.six_epochs,
    "mlm-first": lab.mlm_first,
    "multitask": scores.multitask,
    "papers": papers,
    "findings": scores.papers,
    "errors": scores.errors,
    "plain-cosine": lab.plain_cosine,
    "plain-cosine-whole": lab.plain_cosine_whole,
    "last-layer": lab.last_layer,
    "cycles": lab.cycles,
    "more-epochs": lab.more_epochs,
    "repeated-texts": lab.repeated_texts,
    "difference": lab.difference,
    "future-work": lab.future_work,
    "explanations": lab.explanations,
    "fast-plain": scores.fast_plain,
    "speed": tables.speed,
    "goals": tables.goals,
    "training": tables.training,
    "pairs": tables.pairs,
    "encoding": tables.encoding,
    "int8": tables.int8,
    "heads": tables.heads,
    "serving": tables.serving,
    "scaling": tables.scaling,
    "tasks": tables.tasks,
    "curves": tables.curves,
    "profile": tables.profile,
}


def main() -> None:
    check, stale = "--check" in sys.argv, []
    pages = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in pages:
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
