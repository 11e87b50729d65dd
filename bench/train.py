"""Training examples/s on the real task mix, ours and a plain Hugging Face loop over the same steps, in one run.

python -m bench.train                 # this CPU: minilm; writes results/bench/train-cpu.json
python -m bench.train --device cuda   # minilm and mpnet
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.huggingface import __doc__ as PEER  # noqa: N812 - the text that says what the peer is
from bench.huggingface import time_huggingface
from bench.measure import Timed, Timing, matrix_rate, ratio, save, spread, take_turns
from bench.mix import Mix, Workload
from bench.models import Model
from bench.ours import time_ours
from bench.settings import Settings, parser_of, settings_of

TEXTS = 64  # a step
CUDA = Timing(warm_up=180, rounds=3, steps=60)
CPU = Timing(warm_up=5, rounds=1, steps=20, repeats=3)
MODELS = {"cuda": ("minilm", "mpnet"), "cpu": ("minilm",)}


def figures(workload: Workload, timed: Timed, model: Model, matrix: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of a contender, round by round, and how much of the device's matrix rate that is."""
    rounds = workload.rounds()
    pairs = [(rounds[number % len(rounds)], seconds) for number, seconds in enumerate(timed.seconds)]
    best = matrix["flops_per_second"]["median"]
    return {
        "examples_per_second": spread([count.examples / seconds for count, seconds in pairs]),
        "tokens_per_second": spread([count.tokens / seconds for count, seconds in pairs]),
        "step_milliseconds": spread([1000 * seconds / workload.timing.steps for _, seconds in pairs]),
        "flops_utilisation": spread(
            [model.flops(count.tokens, count.squares) / seconds / best for count, seconds in pairs]
        ),
        "peak_memory": timed.memory,
        "notes": dict(timed.notes or {}),
    }


def compare(
    mix: Mix, model: Model, batch_size: int, timing: Timing, settings: Settings, matrix: Mapping[str, Any]
) -> dict[str, Any]:
    """Ours and the loop on the same steps of the mix."""
    workload, device = mix.workload(batch_size, timing), settings.device
    found = take_turns(
        {"ours": lambda: time_ours(workload, device), "peer": lambda: time_huggingface(workload, model, device)},
        timing.repeats,
    )
    rates = {name: figures(workload, timed, model, matrix) for name, timed in found.items()}
    count = workload.count(workload.timed)
    return {
        "texts_per_step": batch_size,
        "tokens_per_step": count.tokens / len(workload.timed),
        "timing": timing.about(),
        **rates,
        "ratio": ratio(rates["ours"]["examples_per_second"], rates["peer"]["examples_per_second"]),
    }


def measure(settings: Settings) -> dict[str, Any]:
    """Every model of this device, written after each."""
    timing = settings.timing(cuda=CUDA, cpu=CPU)
    matrix = matrix_rate(settings.device, 256 if settings.quick else 0)
    content: dict[str, Any] = {
        "figure": "training examples/s on the task mix",
        "unit": "examples/s",
        "peer_is": " ".join((PEER or "").split()),
        "matrix_rate": matrix,
        "dropout": 0.1,
        **settings.about(),
        "models": {},
    }
    for name in MODELS[settings.device.type]:
        model = settings.model(name)
        mix = settings.task_mix(model)
        found = compare(mix, model, TEXTS, timing, settings, matrix)
        content["source"] = mix.source
        content["models"][name] = {**model.about(), **found}
        save(settings.out, f"train-{settings.device.type}", content)
        print(line(f"train {name}", found), flush=True)
    return content


def line(name: str, found: Mapping[str, Any]) -> str:
    ours, peer = (found[who]["examples_per_second"]["median"] for who in ("ours", "peer"))
    memory = found["ours"]["peak_memory"]
    use = found["ours"]["flops_utilisation"]["median"]
    held = f"  {memory['allocated'] / 2**20:,.0f} MiB" if memory else ""
    return f"{name:24} ours {ours:9.1f}  peer {peer:9.1f}  ratio {found['ratio']['median']:5.2f}  use {use:.1%}{held}"


def main() -> None:
    with settings_of(parser_of(__doc__).parse_args(), "train") as settings:
        measure(settings)


if __name__ == "__main__":
    main()
