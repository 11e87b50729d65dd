"""Training examples/s of a bi-encoder on Quora and STS pairs: ours and sentence-transformers' trainer, in one run.

python -m bench.pairs --device cuda   # writes results/bench/pairs-cuda.json; needs accelerate
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bench.measure import Timing, matrix_rate, ratio, save, take_turns
from bench.mix import Mix
from bench.models import Model
from bench.ours import time_ours
from bench.sentence_trainer import NotInstalledError, time_sentence_transformers
from bench.sentence_trainer import __doc__ as PEER  # noqa: N812
from bench.settings import Settings, parser_of, settings_of
from bench.train import MODELS, figures, line

PAIRS = 32  # a step, which are 64 texts
CUDA = Timing(warm_up=180, rounds=3, steps=60)
CPU = Timing(warm_up=5, rounds=1, steps=20, repeats=3)


def measure(settings: Settings) -> dict[str, Any]:
    """Every model of this device, written after each."""
    device, timing = settings.device, settings.timing(cuda=CUDA, cpu=CPU)
    matrix = matrix_rate(device, 256 if settings.quick else 0)
    content: dict[str, Any] = {
        "figure": "training examples/s of a bi-encoder on pairs",
        "unit": "pairs/s",
        "peer_is": " ".join((PEER or "").split()),
        "pairs_per_step": PAIRS,
        "timing": timing.about(),
        "dropout": 0.1,
        **settings.about(),
        "models": {},
    }
    for name in MODELS[device.type]:
        model = settings.model(name)
        mix = settings.pair_mix(model)
        content["source"] = mix.source
        try:
            found = compare(mix, model, timing, device, matrix)
        except NotInstalledError as error:
            content["not_measured"] = str(error)
            print(f"pairs: not measured, {error}", flush=True)
            break
        content["models"][name] = {**model.about(), **found}
        print(line(f"pairs {name}", found), flush=True)
        save(settings.out, f"pairs-{device.type}", content)
    save(settings.out, f"pairs-{device.type}", content)
    return content


def compare(mix: Mix, model: Model, timing: Timing, device: torch.device, matrix: Mapping[str, Any]) -> dict[str, Any]:
    """Ours and the trainer on the same steps of pairs."""
    workload = mix.workload(PAIRS, timing)
    found = take_turns(
        {
            "ours": lambda: time_ours(workload, device),
            "peer": lambda: time_sentence_transformers(mix, workload, model, device),
        },
        timing.repeats,
    )
    rates = {name: figures(workload, timed, model, matrix) for name, timed in found.items()}
    return {**rates, "ratio": ratio(rates["ours"]["examples_per_second"], rates["peer"]["examples_per_second"])}


def main() -> None:
    with settings_of(parser_of(__doc__).parse_args(), "pairs") as settings:
        measure(settings)


if __name__ == "__main__":
    main()
