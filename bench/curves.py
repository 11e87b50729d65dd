"""Do the fast and the plain path learn the same? Loss curves of both from one seed, without and with dropout.

python -m bench.curves --device cuda   # writes results/bench/curves-cuda.json
python -m bench.curves --fast "training.kernels=auto" --plain "training.kernels=plain"

Without dropout the curves are to lie on each other; with it the two draw different masks and can only be alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from bench.measure import Timing, save
from bench.mix import Mix
from bench.ours import Enough, run_trainer
from bench.settings import Settings, parser_of, settings_of
from minbert.config import TrainingConfig
from minbert.training.trainer import Silent

STEPS = 500
WINDOW = 20  # steps that a point of the smoothed curve is the mean of
HAS_KERNELS = "kernels" in {field.name for field in fields(TrainingConfig)}
FAST, PLAIN = ("training.kernels=auto", "training.kernels=plain") if HAS_KERNELS else ("", "")


class Losses(Silent):
    """Keeps every step's loss, and stops the run after so many."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.found: list[float] = []

    def stepped(self, step: int, record: Mapping[str, Any] | None) -> None:
        if record is not None:
            self.found += [float(np.mean(list(record["loss"].values())))]
        if step == self.steps:
            raise Enough


def losses(mix: Mix, steps: int, batch_size: int, settings: Settings) -> list[float]:
    recipe = mix.workload(batch_size, Timing(1, 1, steps)).recipe
    watcher = Losses(steps)
    logging = replace(recipe, training=replace(recipe.training, log_every=1))
    run_trainer(logging, mix.inputs, settings.device, watcher)
    return watcher.found


def smooth(values: list[float], window: int = WINDOW) -> list[float]:
    kernel = np.ones(min(window, len(values))) / min(window, len(values))
    return [round(float(value), 5) for value in np.convolve(values, kernel, mode="valid")]


def measure(settings: Settings, fast: str = FAST, plain: str = PLAIN, batch_size: int = 32) -> dict[str, Any]:
    steps = 6 if settings.quick else STEPS
    model = settings.model("minilm")
    content: dict[str, Any] = {
        "figure": f"loss of {steps} steps from one seed",
        "steps": steps,
        "batch_size": batch_size,
        "window": WINDOW,
        "variants": {"fast": fast, "plain": plain},
        **settings.about(),
        "model": {"name": "minilm", **model.about()},
        "curves": {},
    }
    for name, dropout in (("without dropout", 0.0), ("with dropout", 0.1)):
        both = {}
        for variant, text in (("fast", fast), ("plain", plain)):
            masks = (f"model.dropout={dropout}", f"model.encoder_dropout={dropout}")
            changed = replace(settings, sets=(*masks, *settings.sets, *text.split()))
            mix = changed.task_mix(model)
            content["source"] = mix.source
            both[variant] = losses(mix, steps, batch_size, settings)
        apart = np.abs(np.subtract(both["fast"], both["plain"]))
        smoothed = {variant: smooth(values) for variant, values in both.items()}
        content["curves"][name] = {
            **smoothed,
            "largest_difference": float(apart.max()),
            "mean_difference": float(apart.mean()),
            "largest_difference_smoothed": float(np.abs(np.subtract(smoothed["fast"], smoothed["plain"])).max()),
            "last_mean": {variant: float(np.mean(values[-100:])) for variant, values in both.items()},
        }
        save(settings.out, f"curves-{settings.device.type}", content)
        print(f"{f'curves {name}':24} largest difference {apart.max():.1e}, mean {apart.mean():.1e}", flush=True)
    return content


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--fast", default=FAST, help="settings of the fast path, separated by spaces")
    parser.add_argument("--plain", default=PLAIN, help="settings of the plain path")
    arguments = parser.parse_args()
    with settings_of(arguments, "curves") as settings:
        measure(settings, arguments.fast, arguments.plain)


if __name__ == "__main__":
    main()
