"""How training grows: with the texts of a step (time, memory, share of the matrix rate), and with the number of tasks.

python -m bench.scaling                 # this CPU; writes results/bench/scaling-cpu.json and tasks-cpu.json
python -m bench.scaling --device cuda   # 16 to 1024 texts a step, minilm and mpnet, ours and the Hugging Face loop

Utilisation counts 6 operations for each matrix parameter of the encoder's layers and each real token, and
12 * layers * width for each pair of tokens that see each other; padding, embeddings and heads count nothing.
"""

from __future__ import annotations

from typing import Any

from bench.measure import Timing, matrix_rate, save, take_turns
from bench.mix import task_copies
from bench.ours import time_ours
from bench.settings import Settings, parser_of, settings_of
from bench.train import MODELS, TEXTS, compare, figures, line

CUDA = Timing(warm_up=36, rounds=3, steps=12)
CPU = Timing(warm_up=2, rounds=3, steps=2)
BATCHES = {"cuda": (16, 64, 256, 1024), "cpu": (1, 4, 16, 64)}
TASKS = (1, 2, 4, 8, 16)


def measure_texts(settings: Settings) -> dict[str, Any]:
    """1 to 64 times the texts in a step."""
    timing = settings.timing(cuda=CUDA, cpu=CPU)
    matrix = matrix_rate(settings.device, 256 if settings.quick else 0)
    content: dict[str, Any] = {
        "figure": "training by texts a step",
        "formula": "(6 * matrix parameters * tokens + 12 * layers * width * sum of squared lengths) / seconds / rate",
        "matrix_rate": matrix,
        "dropout": 0.1,
        **settings.about(),
        "models": {},
    }
    for name in MODELS[settings.device.type]:
        model = settings.model(name)
        mix = settings.task_mix(model)
        content["source"] = mix.source
        batches: dict[str, Any] = {}
        content["models"][name] = {**model.about(), "batches": batches}
        for texts in (4, 8) if settings.quick else BATCHES[settings.device.type]:
            batches[str(texts)] = compare(mix, model, texts, timing, settings, matrix)
            save(settings.out, f"scaling-{settings.device.type}", content)
            print(line(f"scaling {name} {texts}", batches[str(texts)]), flush=True)
    return content


def measure_tasks(settings: Settings) -> dict[str, Any]:
    """The same 64 texts a step, of 1 to 16 tasks with a head each."""
    timing = settings.timing(cuda=CUDA, cpu=CPU)
    model = settings.model("minilm")
    matrix = matrix_rate(settings.device, 256 if settings.quick else 0)
    content: dict[str, Any] = {
        "figure": f"training by tasks in a step of {TEXTS} texts",
        "timing": timing.about(),
        "dropout": 0.1,
        **settings.about(),
        "model": {"name": "minilm", **model.about()},
        "tasks": {},
    }
    for number in (1, 2) if settings.quick else TASKS:
        mix = task_copies(model.folder, settings.data, number, settings.sets)
        workload = mix.workload(TEXTS // number, timing)
        (timed,) = take_turns({"ours": lambda w=workload: time_ours(w, settings.device)}, timing.repeats).values()  # type: ignore[misc]
        content["tasks"][str(number)] = figures(workload, timed, model, matrix)
        save(settings.out, f"tasks-{settings.device.type}", content)
        step = content["tasks"][str(number)]["step_milliseconds"]["median"]
        print(f"{f'tasks {number}':24} {step:9.2f} ms a step", flush=True)
    return content


def main() -> None:
    with settings_of(parser_of(__doc__).parse_args(), "scaling") as settings:
        measure_texts(settings)
        measure_tasks(settings)


if __name__ == "__main__":
    main()
