"""Training examples/s of a bi-encoder on Quora and STS pairs: ours and sentence-transformers' trainer, in one run.

python -m bench.pairs --device cuda   # writes results/bench/pairs-cuda.json; needs accelerate
"""

from __future__ import annotations

from typing import Any

from bench.measure import Timing, matrix_rate, ratio, save, take_turns
from bench.ours import time_ours
from bench.sentence_trainer import NotInstalledError, time_sentence_transformers
from bench.sentence_trainer import __doc__ as PEER  # noqa: N812
from bench.settings import Settings, parser_of, settings_of
from bench.train import figures, line

PAIRS = 32  # a step, which are 64 texts
CUDA = Timing(warm_up=180, rounds=3, steps=60)
CPU = Timing(warm_up=5, rounds=1, steps=20, repeats=3)


def measure(settings: Settings) -> dict[str, Any]:
    model, device = settings.model("minilm"), settings.device
    mix = settings.pair_mix(model)
    timing = settings.timing(cuda=CUDA, cpu=CPU)
    workload = mix.workload(PAIRS, timing)
    content: dict[str, Any] = {
        "figure": "training examples/s of a bi-encoder on pairs",
        "unit": "pairs/s",
        "peer_is": " ".join((PEER or "").split()),
        "source": mix.source,
        "pairs_per_step": PAIRS,
        "timing": timing.about(),
        "dropout": 0.1,
        **settings.about(),
        "model": {"name": "minilm", **model.about()},
    }
    try:
        found = take_turns(
            {
                "ours": lambda: time_ours(workload, device),
                "peer": lambda: time_sentence_transformers(mix, workload, model, device),
            },
            timing.repeats,
        )
    except NotInstalledError as error:
        content["not_measured"] = str(error)
        print(f"pairs: not measured, {error}", flush=True)
    else:
        matrix = matrix_rate(device, 256 if settings.quick else 0)
        rates = {name: figures(workload, timed, model, matrix) for name, timed in found.items()}
        content |= rates
        content["ratio"] = ratio(rates["ours"]["examples_per_second"], rates["peer"]["examples_per_second"])
        print(line("pairs minilm", content), flush=True)
    save(settings.out, f"pairs-{device.type}", content)
    return content


def main() -> None:
    with settings_of(parser_of(__doc__).parse_args(), "pairs") as settings:
        measure(settings)


if __name__ == "__main__":
    main()
