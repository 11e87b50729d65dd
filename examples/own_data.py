"""Train one model for two questions about your own CSV, then ask it.

    python examples/own_data.py --encoder minilm

Here the CSV is made up on the spot; put your own in its place. docs/your-data.md has all the settings.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import minbert

ROWS = [
    ("I was charged twice this month", "billing", 8),
    ("My invoice shows the wrong company name", "billing", 4),
    ("Can I pay by bank transfer?", "billing", 2),
    ("The refund has not arrived after three weeks", "billing", 9),
    ("I cannot log in since this morning", "login", 9),
    ("Where do I change my password?", "login", 3),
    ("The code never reaches my phone", "login", 7),
    ("My account is locked and I have a deadline today", "login", 10),
    ("Do you have a dark theme?", "other", 1),
    ("Thanks, the new search is great", "other", 1),
    ("The export is empty for all our teams", "other", 8),
    ("Is there a desktop version?", "other", 2),
]


def recipe(encoder: str) -> dict[str, object]:
    """Two tasks that read the same file."""
    shared = {"train": "tickets.csv", "dev": "tickets.csv", "text": "text"}
    return {
        "name": "tickets",
        "model": {"encoder": encoder, "pooling": "mean", "dropout": 0.0},
        "tasks": {
            "topic": {**shared, "kind": "classification", "label": "topic", "classes": ["billing", "login", "other"]},
            "urgency": {**shared, "kind": "regression", "label": "urgency", "low": 1, "high": 10},
        },
        # So few rows would spoil the encoder: it stays as it is, and only the heads learn.
        "optimizer": {"head_lr": 1e-2, "schedule": "constant"},
        "training": {"mode": "pretrain", "epochs": 20, "batch_size": 4, "evaluate_every": 120},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="minilm")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "tickets.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "topic", "urgency"), *ROWS])
        run = minbert.train(recipe(arguments.encoder), data=folder, out=Path(folder) / "run")
        model = minbert.load(run.model)
    questions = ["I forgot my password", "You took money from my card by mistake"]
    answers = model.predict(questions)
    for question, topic, urgency in zip(questions, answers["topic"], answers["urgency"], strict=True):
        print(f"{question}: {topic['label']} ({topic['probability']:.0%}), urgency {urgency['score']:.1f} of 10")


if __name__ == "__main__":
    main()
