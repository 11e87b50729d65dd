"""What int8 costs in accuracy: dev scores of a trained model in fp32 and in int8.

python -m bench.accuracy runs/multitask/model --data DIR       # writes results/bench/int8-accuracy.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench.measure import machine, save
from bench.settings import OUT
from minbert.evaluating import evaluate_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--about", default="", help="which model it is, for the table")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    scored: dict[str, dict[str, Any]] = {
        precision: {
            task: {"rows": len(found.labels), "metric": found.task.metric_name, "score": found.score}
            for task, found in evaluate_model(
                arguments.model, data=arguments.data, device="cpu", precision=precision, samples=1
            ).items()
        }
        for precision in ("fp32", "int8")
    }
    lost = {task: scored["fp32"][task]["score"] - scored["int8"][task]["score"] for task in scored["fp32"]}
    content = {
        "figure": "dev scores in fp32 and in int8",
        "model": arguments.about,
        "scores": scored,
        "points_lost": {task: 100 * value for task, value in lost.items()},
        "command": "python -m bench.accuracy MODEL --data DIR",
        "environment": machine(torch.device("cpu")),
    }
    save(arguments.out, "int8-accuracy", content)
    for task, value in lost.items():
        print(f"{task}: {100 * value:+.2f} points lost")


if __name__ == "__main__":
    main()
