"""Where a training step's time goes: some steps under torch.profiler, as a short table.

python -m bench.profile --kernels plain --device cuda    # writes results/bench/profile-plain-cuda.json
python -m bench.profile --kernels auto --device cuda
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.curves import HAS_KERNELS
from bench.measure import Timing, save, synchronize
from bench.ours import Enough, run_trainer
from bench.settings import Settings, parser_of, settings_of
from minbert.training.trainer import Silent

TEXTS = 64
CUDA = Timing(warm_up=60, rounds=1, steps=20)
CPU = Timing(warm_up=2, rounds=1, steps=3)
ROWS = 12  # of the table
NAME = 90  # letters of a kernel's name


class Profiling(Silent):
    """Profiles the steps after the warm-up."""

    def __init__(self, timing: Timing, device: torch.device) -> None:
        self.timing, self.device = timing, device
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.profiler = profile(activities=activities)
        self.started = self.seconds = 0.0

    def stepped(self, step: int, record: Mapping[str, Any] | None) -> None:  # noqa: ARG002 - a watcher's signature
        if step == self.timing.warm_up:
            synchronize(self.device)
            self.profiler.start()
            self.started = time.perf_counter()
        elif step == self.timing.total:
            synchronize(self.device)
            self.seconds = time.perf_counter() - self.started
            self.profiler.stop()
            raise Enough


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def summarise(events: Iterable[Any], seconds: float, steps: int) -> dict[str, Any]:
    """Kernels by time, launches by kind, and how much of the time the device was at work. Milliseconds are of a step."""
    kernels: dict[str, list[float]] = defaultdict(list)
    launches: dict[str, int] = defaultdict(int)
    work: dict[str, float] = defaultdict(float)
    spans = []
    for event in events:
        if getattr(event, "is_user_annotation", False) or event.name.startswith(("ProfilerStep", "Optimizer.")):
            continue  # a name for a span of kernels, not one of them
        if event.device_type == DeviceType.CUDA:
            kernels[event.name[:NAME]].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
        else:
            work[event.name[:NAME]] += event.self_cpu_time_total
            if "Launch" in event.name or event.name.startswith(("cudaMemcpy", "cudaStreamSync", "cudaDeviceSync")):
                launches[event.name] += 1

    def table(found: Mapping[str, float]) -> list[dict[str, Any]]:
        ordered = sorted(found.items(), key=lambda item: -item[1])[:ROWS]
        return [{"name": name, "milliseconds": micro / 1000 / steps} for name, micro in ordered]

    by_kernel = table({name: sum(times) for name, times in kernels.items()})
    for row in by_kernel:
        row["calls"] = len(kernels[row["name"]]) / steps
    return {
        "step_milliseconds": 1000 * seconds / steps,
        "kernel_milliseconds": sum(map(sum, kernels.values())) / 1000 / steps,
        "kernels_per_step": sum(map(len, kernels.values())) / steps,
        "busy": covered(spans) / 1e6 / seconds if spans else None,
        "cpu_milliseconds": sum(work.values()) / 1000 / steps,
        "launches_per_step": {name: number / steps for name, number in sorted(launches.items())},
        "kernels": by_kernel,
        "cpu": table(work),
    }


def measure(settings: Settings, kernels: str, name: str = "minilm") -> dict[str, Any]:
    """
    Args:
        settings: where and on what.
        kernels: "plain" or "auto", the recipe's setting.
        name: of the encoder.
    """
    chosen = (f"training.kernels={kernels}",) if HAS_KERNELS else ()
    timing = settings.timing(cuda=CUDA, cpu=CPU)
    model = settings.model(name)
    mix = replace(settings, sets=(*settings.sets, *chosen)).task_mix(model)
    workload = mix.workload(TEXTS, Timing(timing.warm_up, 1, timing.steps))
    watcher = Profiling(workload.timing, settings.device)
    run_trainer(workload.recipe, workload.inputs, settings.device, watcher, workload.steps)
    found = summarise(watcher.profiler.events() or (), watcher.seconds, timing.steps)
    content = {
        "figure": f"a training step of {TEXTS} texts, profiled (which slows it)",
        "kernels_setting": kernels,
        "model": {"name": name, **model.about()},
        "source": mix.source,
        "timing": workload.timing.about(),
        **found,
        **settings.about(),
    }
    content["command"] = f"python -m bench.profile --kernels {kernels} --model {name} --device {settings.device.type}"
    which = "" if name == "minilm" else f"-{name}"
    save(settings.out, f"profile-{kernels}{which}-{settings.device.type}", content)
    busy = "" if found["busy"] is None else f"  busy {found['busy']:.0%}"
    print(f"{f'profile {kernels}':24} {found['step_milliseconds']:9.2f} ms a step{busy}", flush=True)
    return content


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kernels", choices=("plain", "auto"), default="auto")
    parser.add_argument("--model", choices=("minilm", "mpnet"), default="minilm")
    arguments = parser.parse_args()
    with settings_of(arguments, "profile") as settings:
        measure(settings, arguments.kernels, arguments.model)


if __name__ == "__main__":
    main()
