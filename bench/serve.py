"""The server under load: 64 clients with single short texts, each answer checked against the offline predictor.

    python -m bench.serve MODEL                     # writes results/bench/serve.json
    python -m bench.serve --requests 2048           # fewer requests: results/bench/serve-short.json; part of make bench
    python -m bench.serve MODEL --quick --out DIR   # to try it

MODEL is a model folder, or one of `minbert export --to onnx-int8`, which the server opens without torch. Without it a
minilm with fresh heads is served: for speed it does not matter what they learnt.

Server, load generator and offline predictor are processes of their own, one after the other but for the first two; the
load generator's share of the CPU is stated, since it takes from the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import torch

from bench.measure import machine, save
from bench.settings import OUT
from bench.texts import sentences
from minbert.delivery.exported import is_export, read_export
from minbert.delivery.predictor import Predictor
from minbert.experiment import new_model
from minbert.model.saved import save_model
from minbert.recipes import parse_recipe
from minbert.tasks import Task

CLIENTS = 64
TEXTS = 1024
REQUESTS = 200_000  # of the memory run
TURNS = 4  # of those that are compared


@contextmanager
def serving(model: Path, precision: str, *options: str) -> Iterator[tuple[int, int, float]]:
    """The server's port, its process id, and the seconds from its start until it was ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "minbert", "serve", str(model), "--port", str(port), "--precision", precision]
    started = time.perf_counter()
    process = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{port}/readyz"):
                    break
            except URLError:
                if process.poll() is not None:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.02)
        yield port, process.pid, time.perf_counter() - started
    finally:
        process.terminate()
        process.wait(60)


async def load(port: int, bodies: list[bytes], requests: int) -> tuple[list[float], dict[int, Any]]:
    """So many requests by 64 clients, each of which waits for its answer: the seconds of each, and an answer a body."""
    seconds: list[float] = []
    answers: dict[int, Any] = {}
    numbers = iter(range(requests))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            body = bodies[number % len(bodies)]
            head = f"POST /v1/predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            started = time.perf_counter()
            writer.write(head.encode() + body)
            top = await reader.readuntil(b"\r\n\r\n")
            length = int(top.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            found = await reader.readexactly(length)
            seconds.append(time.perf_counter() - started)
            if not top.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"refused: {found.decode()}")
            place = number % len(bodies)
            if answers.setdefault(place, found) != found:
                answers[place, number] = found  # type: ignore[index]
        writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return seconds, answers


def generate(port: int, file: Path, requests: int) -> None:
    """The load generator's process: what it found, as JSON on standard output."""
    bodies = [json.dumps(body).encode() for body in json.loads(file.read_text())]
    asyncio.run(load(port, bodies, min(requests, 256)))  # warm-up
    used, started = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), time.perf_counter()
    seconds, answers = asyncio.run(load(port, bodies, requests))
    elapsed = time.perf_counter() - started
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - used
    kept = [[key if isinstance(key, int) else key[0], json.loads(found)] for key, found in answers.items()]
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    figures = {
        "requests": requests,
        "requests_per_second": requests / elapsed,
        "p50_ms": 1000 * p50,
        "p99_ms": 1000 * p99,
        "p99_over_p50": p99 / p50,
        "generator_cores": used / elapsed,
    }
    print(json.dumps({"figures": figures, "answers": kept}))


def under_load(port: int, bodies: list[Any], requests: int, work: Path) -> tuple[dict[str, Any], list[Any]]:
    file = work / "bodies.json"
    file.write_text(json.dumps(bodies))
    command = [sys.executable, "-m", "bench.serve", "--generate", str(port), str(file), str(requests)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found["figures"], found["answers"]


def memory(pid: int) -> int:
    """Bytes that the process and those that it started hold."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    lines = [line for one in family for line in Path(f"/proc/{one}/status").read_text().splitlines()]
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def offline(predictor: Predictor, texts: list[str], task: str, rounds: int) -> float:
    """Texts a second, in batches of as many as there are clients."""
    predictor.predict(texts[:CLIENTS], tasks=[task])
    started = time.perf_counter()
    for _ in range(rounds):
        for start in range(0, len(texts), CLIENTS):
            predictor.predict(texts[start : start + CLIENTS], tasks=[task])
    return rounds * len(texts) / (time.perf_counter() - started)


def worst_difference(answers: list[Any], expected: list[dict[str, Any]], task: str) -> float:
    """Between any probability that was served and the offline predictor's."""
    return max(
        abs(value - expected[number]["probabilities"][name])
        for number, answer in answers
        for name, value in answer["texts"][0][task]["probabilities"].items()
    )


def reading_alike(tasks: Mapping[str, Task]) -> list[str]:
    """The most tasks that read the same input, a text, two texts or a pair as one: those that one encoding serves."""
    groups: dict[Any, list[str]] = {}
    for name, task in tasks.items():
        if not task.is_masked:
            groups.setdefault((task.answers_pairs, task.answer_views, task.normalise), []).append(name)
    return max(groups.values(), key=len)


def tasks_ratio(port: int, texts: list[str], tasks: Mapping[str, Task], requests: int, work: Path) -> Any:
    """What several tasks over the same inputs cost, against one of them; None where no two read the same."""
    several = reading_alike(tasks)
    if len(several) < 2:
        return None
    pairs = [list(pair) for pair in zip(texts, texts[1:] + texts[:1], strict=True)]
    rows: dict[str, list[Any]] = {"pairs": pairs} if tasks[several[0]].answers_pairs else {"texts": texts}
    ((kind, given),) = rows.items()
    bodies = {
        name: [{kind: [row], "tasks": asked} for row in given]
        for name, asked in (("one", several[:1]), ("several", several))
    }
    found: dict[str, list[float]] = {name: [] for name in bodies}
    for turn in range(TURNS):  # by turns, so that whatever else the machine does falls on both
        for name in sorted(bodies, reverse=bool(turn % 2)):
            found[name].append(under_load(port, bodies[name], requests // TURNS, work)[0]["requests_per_second"])
    rates = {name: statistics.median(rounds) for name, rounds in found.items()}
    cost = rates["one"] / rates["several"]
    return {"tasks": several, "against": several[0], "cost": cost, "requests_per_second": rates, "rounds": found}


def fresh_model(folder: Path) -> Path:
    """A minilm with three tasks that have learnt nothing."""
    recipe = parse_recipe(
        {"name": "fresh", "tasks": {"sst": {}, "quora": {}, "sts": {}}, "model": {"encoder": "minilm"}}
    )
    tokenizer, model, manifest = new_model(recipe, torch.device("cpu"))
    save_model(folder, model, tokenizer, manifest)
    return folder


def main() -> None:
    if "--generate" in sys.argv:
        port, file, requests = sys.argv[sys.argv.index("--generate") + 1 :]
        generate(int(port), Path(file), int(requests))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--precision", help="default int8; an export has its own")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of the memory run, and the most of the others")
    parser.add_argument("--workers", type=int, default=1, help="processes of the server")
    parser.add_argument("--quick", action="store_true", help="a few requests only")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        measure(arguments, Path(work))


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure over the turns, and all of the rates."""
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return middle | {"rounds": [one["requests_per_second"] for one in rounds]}


def ratio_by_turn(served: list[dict[str, Any]], others: list[float]) -> dict[str, Any]:
    """The median of the turns' own ratios."""
    ratios = [one["requests_per_second"] / other for one, other in zip(served, others, strict=True)]
    return {"median": statistics.median(ratios), "rounds": ratios}


def measure(arguments: argparse.Namespace, work: Path) -> None:
    total = min(arguments.requests, 1024) if arguments.quick else arguments.requests
    many = 512 if arguments.quick else min(8192, total)
    model = arguments.model or fresh_model(work / "minilm")
    exported = read_export(model)["precision"] if is_export(model) else ""
    precision = arguments.precision or exported or "int8"

    predictor = Predictor.load(model, precision=precision)
    task = next(name for name, one in predictor.tasks.items() if one.is_classification and not one.answers_pairs)
    texts, source = sentences(TEXTS)
    short = [" ".join(text.split()[:12]) for text in texts]
    expected = [predictor.predict([text], tasks=[task])[task][0] for text in short]
    bodies = [{"texts": [text], "tasks": [task]} for text in short]
    options = ["--workers", str(arguments.workers)]

    with (
        serving(model, precision, *options) as (port, pid, ready),
        serving(model, precision, *options, "--no-batching") as (alone, _, _),
    ):
        found: dict[str, list[dict[str, Any]]] = {"served": [], "served_without_batching": []}
        rates: list[float] = []
        answers: list[Any] = []
        for _ in range(TURNS):  # by turns, since the machine's speed changes; a server that is not asked costs nothing
            rates.append(offline(predictor, short, task, 1 if arguments.quick else 2))
            for name, place in (("served", port), ("served_without_batching", alone)):
                figures, said = under_load(place, bodies, many // TURNS, work)
                found[name].append(figures)
                answers += said
        several = tasks_ratio(port, short, predictor.tasks, many, work)
        before = memory(pid)
        long, _ = under_load(port, bodies, total, work)
        after = memory(pid)
    middle = {name: medians(rounds) for name, rounds in found.items()}
    content = {
        "figure": f"{CLIENTS} clients with single texts of at most 12 words",
        "texts": source,
        "precision": precision,
        "model": "an export" if exported else "a model folder" if arguments.model else "minilm, fresh heads",
        "workers": arguments.workers,
        "turns": TURNS,
        "offline_texts_per_second": statistics.median(rates),
        **middle,
        "against_offline": ratio_by_turn(found["served"], rates),
        "against_no_batching": ratio_by_turn(
            found["served"], [one["requests_per_second"] for one in found["served_without_batching"]]
        ),
        "worst_difference": worst_difference(answers, expected, task),
        "several_tasks": several,
        "ready_seconds": ready,
        "memory": {"requests": total, "before": before, "after": after, "growth": after / before - 1, "load": long},
        "command": f"python -m bench.serve {'MODEL ' if arguments.model else ''}--workers {arguments.workers} --requests {total}",
        "environment": machine(torch.device("cpu")),
    }
    save(arguments.out, "serve" if total >= REQUESTS else "serve-short", content)
    print(json.dumps({key: value for key, value in content.items() if key != "environment"}, indent=2))


if __name__ == "__main__":
    main()
