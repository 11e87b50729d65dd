"""Made-up papers, and what stands for `minbert train` where a test is about the processes and not about training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from minbert.data.raw import fingerprint
from minbert.reproduction.jobs import Job, Settings, made_otherwise, plan_jobs
from minbert.reproduction.recipes import Paper, choose_rows
from minbert.reproduction.runs import Running

ROOT = Path(__file__).parent.parent.parent


COMMON = """
[tasks.sst]
train = "sentiment-train.tsv"
dev = "sentiment-dev.tsv"
test = []
[tasks.sts]
train = "similarity-train.tsv"
dev = "similarity-dev.tsv"
test = []
[training]
epochs = 2
batch_size = 8
train_sample = 8
"""


STAGE = '[[stages]]\nname = "first"\n[stages.tasks.sst]\ntrain = "sentiment-train.tsv"\ndev = "sentiment-dev.tsv"\n'


ROWS = {
    "smith/common.toml": COMMON,
    "smith/1-plain.toml": 'base = "common.toml"\n[paper]\nrow = "Plain"\ndev = { sst = 0.4, sts = 0.5 }\noverall = { dev = 0.45 }\n',
    "smith/2-mean.toml": """
base = "common.toml"
[model]
pooling = "mean"
[paper]
row = "Mean"
after = "smith/1-plain"
dev = { sst = 0.5, sts = 0.7 }
overall = { dev = 0.6, test = 0.61 }
test = { sst = 0.51 }
note = "A guess."
""",
    "smith/3-other.toml": 'base = "common.toml"\n[paper]\nrow = "Other"\n[optimizer]\nlr = 1e-4\n',
    "smith/findings.toml": """
title = "Smith, On Vectors"
best = "2-mean"
[[findings]]
claim = "The mean is better."
where = "section 3"
better = "2-mean"
worse = "1-plain"
on = "mean"
[[findings]]
claim = "It is no better on SST."
better = "2-mean"
worse = "1-plain"
on = "sst"
kind = "no better"
""",
    "afterwards/one.toml": 'base = "../smith/common.toml"\n[paper]\nrow = "One"\n',
    "alone.toml": "[tasks.sst]\n",
}


# Stands for `minbert train`: writes what a run leaves behind, or waits, or fails, as a file beside the recipe says.
PRETENDER = """
import json, sys, time
from pathlib import Path
words = sys.argv[1:]
recipe, out = Path(words[0]), Path(words[words.index("--out") + 1])
(recipe.parent / f"{recipe.stem}.calls").open("a").write(" ".join(words) + chr(10))
out.mkdir(parents=True, exist_ok=True)
sys.path.insert(0, SOURCE)
from minbert.recipes import as_dict, read_recipe, to_toml
sets = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
resolved = read_recipe(recipe, sets=sets, seed=int(words[words.index("--seed") + 1]))
(out / "recipe.toml").write_text(to_toml(resolved))
if (recipe.parent / f"{recipe.stem}.fails").exists():
    print("error: the dog ate it")
    sys.exit(2)
if (recipe.parent / f"{recipe.stem}.waits").exists():
    print("waiting", flush=True)
    (out / "waiting").touch()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
(out / "checkpoints").mkdir(exist_ok=True)
(out / "runs" / "1" / "models").mkdir(parents=True, exist_ok=True)
(out / "model").mkdir(exist_ok=True)
score = 0.3 + 0.1 * (resolved.model.pooling == "mean") + 0.001 * resolved.seed
found = {"rows": 3, "metric": "accuracy", "metrics": {"accuracy": {"value": score, "low": 0, "high": 1}}}
note = {"rows": 24, "skipped": {}, "truncated": {"texts": 0, "tokens": 0}, "files": {"/home/me/data/sst.tsv": "ab"}}
kinds = {"sst": "classification", "sts": "pair-regression"}
pairs = [("A dog runs.", "A dog runs.", 5.0, 4.5), ("A dog runs.", "He sleeps.", 0.0, 1.0)]
rows = [{"id": str(n), "text": a, "text2": b, "label": y, "prediction": z} for n, (a, b, y, z) in enumerate(pairs)]
(out / "predictions").mkdir(exist_ok=True)
(out / "predictions" / "sts.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
single = {"id": "7", "text": "A dog sits.", "label": 0, "prediction": 1, "probabilities": [0.2, 0.8]}
(out / "predictions" / "sst.jsonl").write_text(json.dumps(single) + chr(10))
results = {"name": resolved.name, "encoder": resolved.model.encoder, "seed": resolved.seed, "kinds": kinds,
    "dev": {"sst": {**found, "classes": ["bad", "good"]}, "sts": found},
    "overall": {"2023": score, "2024": score}, "seconds": 7.0, "planned_steps": 6, "whole_steps": 12,
    "data": {"train": {"sst": note, "sts": note}}, "recipe": as_dict(resolved),
    "environment": {"device_name": "abacus", "commit": "abc"}}
(out / "results.json").write_text(json.dumps(results))
records = [{"kind": "train", "step": 1}]
for epoch in (1, 2):
    records.append({"kind": "evaluation", "step": 3 * epoch, "epoch": epoch, "kept": ["model"] * (epoch == 1),
        "scores": {"dev": {"sst": score - epoch, "sts": None}}, "seconds": 1.0})
(out / "metrics.jsonl").write_text("".join(json.dumps(record) + chr(10) for record in records))
"""


def is_done(job: Job, settings: Settings) -> bool:
    return made_otherwise(job, settings) == []


class Listener:
    """Remembers what it is told; presses Ctrl-C when a run has come so far that it waits."""

    def __init__(self, *, interrupt: bool = False) -> None:
        self.interrupt = interrupt
        self.begun: list[str] = []
        self.done: list[str] = []
        self.why: list[str] = []
        self.most = 0

    def looked(self, running: list[Running], _waiting: int) -> None:
        self.most = max(self.most, len(running))
        if self.interrupt and running and all((one.folder / "waiting").exists() for one in running):
            raise KeyboardInterrupt

    def started(self, job: Job, log: Path) -> None:
        assert log.name == f"seed{job.seed}.log"
        self.begun.append(f"{job.row.name}:{job.seed}")

    def finished(self, job: Job, _results: Mapping[str, Any]) -> None:
        self.done.append(f"{job.row.name}:{job.seed}")

    def failed(self, _job: Job, why: str) -> None:
        self.why.append(why)


def jobs_of(papers: Mapping[str, Paper], *targets: str, seeds: int = 1) -> list[Job]:
    return plan_jobs(papers, choose_rows(papers, targets), seeds=seeds)


def calls(recipes: Path, row: str) -> list[str]:
    path = recipes / f"{row}.calls"
    return path.read_text().splitlines() if path.exists() else []


def notes_of(folder: Path, **kinds: str) -> dict[str, Any]:
    """What a run says of the files it has read."""
    return {
        split: {
            task: {"files": {f"{kind}-{split}.tsv": fingerprint(folder / f"{kind}-{split}.tsv")}}
            for task, kind in kinds.items()
        }
        for split in ("train", "dev")
    }


def real_settings(settings: Settings, encoder: Path, data: Path, *sets: str) -> Settings:
    """That really train, for an epoch."""
    sets = ("training.epochs=1", *sets)
    real = replace(settings, encoder=str(encoder), data=str(data), device="cpu", sets=sets)
    return replace(real, trainer=Settings.trainer)


def written(job: Job, settings: Settings, **changes: Any) -> None:
    """Other figures in a result."""
    path = job.result(settings)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class Impatient(Listener):
    """Presses Ctrl-C as soon as a run has logged a step beyond this one."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def looked(self, running: list[Running], _waiting: int) -> None:
        if running and running[0].last_record().get("step", 0) > self.step:
            raise KeyboardInterrupt
