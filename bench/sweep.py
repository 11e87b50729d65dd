"""Try several changes of a recipe side by side and print a table.

    python -m bench.sweep recipes/multitask.toml --data DIR --out runs/sweep "" "optimizer.lr=1e-4" "seed=2 model.pooling=mean"

Each quoted argument is one variant: settings separated by spaces (see `minbert train --set`). All run at once, a
process each: on a GPU that a single small model does not fill, that is many times faster than one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--results", type=Path, help="folder for a copy of each results.json")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    started = time.perf_counter()
    running = []
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, variant in enumerate(arguments.variants):
        folder = arguments.out / str(number)
        command = [sys.executable, "-m", "minbert", "train", arguments.recipe, "--out", str(folder), "--overwrite"]
        command += ["--device", arguments.device, *(["--data", arguments.data] if arguments.data else [])]
        for setting in variant.split():
            command += ["--set", setting]
        if arguments.results:
            command += ["--results", str(arguments.results / f"{number}.json")]
        log = (arguments.out / f"{number}.log").open("w")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "160"}
        running.append((variant, folder, subprocess.Popen(command, stdout=log, stderr=log, env=environment)))
    for number, (variant, folder, process) in enumerate(running):
        if process.wait() != 0:
            tail = (arguments.out / f"{number}.log").read_text()[-600:]
            print(f"{number} FAILED {variant}\n{tail}")
            continue
        results = json.loads((folder / "results.json").read_text())
        scores = {name: found["metrics"][found["metric"]]["value"] for name, found in results["dev"].items()}
        tuned = {name: found["metrics"]["accuracy"]["value"] for name, found in results["tuned_on_dev"].items()}
        line = "  ".join(f"{name} {score:.4f}" for name, score in scores.items())
        extra = "  ".join(f"{name}* {score:.4f}" for name, score in tuned.items())
        print(
            f"{number}  mean {results['overall']['2023']:.4f}  {line}  ({extra})  {results['seconds']:.0f} s  {variant}"
        )
    print(f"{time.perf_counter() - started:.0f} s in all; * at the threshold chosen on dev")


if __name__ == "__main__":
    main()
