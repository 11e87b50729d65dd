"""A picture of a session of `minbert try`, for the docs: docs/images/try.svg.

python -m bench.screenshot runs/quickstart/model
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from minbert.delivery.predictor import Predictor
from minbert.trying import Session

OUT = Path(__file__).parent.parent / "docs" / "images" / "try.svg"
LINES = (
    "What a delightful evening, I loved every minute.",
    ":why",
    "How do I get ink out of a shirt? | What removes pen stains from cotton?",
    ":why similarity",
)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    console = Console(record=True, width=84, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    session = Session(Predictor.load(sys.argv[1]), console)
    for line in LINES:
        console.print(f"[bold cyan]>[/] {line}", highlight=False)
        session.take(line)
    svg = console.export_svg(title="minbert try", theme=MONOKAI, unique_id="minbert-try")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # which browsers would fetch from elsewhere
    OUT.write_text(svg.replace("Fira Code, monospace", "ui-monospace, monospace"), encoding="utf-8")
    print(OUT)


if __name__ == "__main__":
    main()
