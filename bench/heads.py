"""All heads from one encoding against a model for each task: answers/s of the same predictor, in one run.

python -m bench.heads                 # writes results/bench/heads-cpu.json
"""

from __future__ import annotations

import time
from typing import Any

from bench.measure import Timed, ratio, save, spread, synchronize, take_turns
from bench.settings import Settings, parser_of, settings_of
from bench.texts import sentences
from minbert.config import SAMPLE
from minbert.delivery.predictor import Predictor
from minbert.experiment import new_model
from minbert.recipes import parse_recipe

COUNT = {"cuda": 10_000, "cpu": 500}
ROUNDS = 3
TASKS: dict[str, dict[str, Any]] = {
    "feeling": {"like": "sst"},
    "verdict": {"like": "cfimdb"},
    "stars": {"kind": "regression", "train": ["stars.csv"], "low": 1.0, "high": 5.0},
}
"""Three tasks that read one text: five classes, two classes, a score."""


def measure(settings: Settings) -> dict[str, Any]:
    device = settings.device
    model = settings.model("minilm")
    texts, source = sentences(32 if settings.quick else COUNT[device.type], settings.data or SAMPLE)

    def predictor(*names: str) -> Predictor:
        recipe = parse_recipe(
            {"tasks": {name: TASKS[name] for name in names}, "model": {"encoder": str(model.folder), "max_tokens": 256}}
        )
        tokenizer, network, manifest = new_model(recipe, device)
        return Predictor(network, tokenizer, manifest)

    together, apart = predictor(*TASKS), [predictor(name) for name in TASKS]

    def answer(predictors: list[Predictor]) -> Timed:
        started = time.perf_counter()
        for one in predictors:
            one.answers(texts)
        synchronize(device)
        return Timed((time.perf_counter() - started,))

    for warm in (together, *apart):
        warm.answers(texts[:64])
    ways = {"ours": lambda: answer([together]), "peer": lambda: answer(apart)}
    found = take_turns(ways, 2 if settings.quick else ROUNDS)
    rates = {name: spread([len(texts) / seconds for seconds in timed.seconds]) for name, timed in found.items()}
    content = {
        "figure": "three tasks of one text: one encoding against three models",
        "unit": "texts/s",
        "tasks": list(TASKS),
        "texts": len(texts),
        "source": source,
        **rates,
        "ratio": ratio(rates["ours"], rates["peer"]),
        "model": {"name": "minilm", **model.about()},
        **settings.about(),
    }
    save(settings.out, f"heads-{device.type}", content)
    together_rate, apart_rate = rates["ours"]["median"], rates["peer"]["median"]
    times = content["ratio"]["median"]
    print(f"{'heads':24} one encoding {together_rate:9.1f}  three models {apart_rate:9.1f}  ratio {times:5.2f}")
    return content


def main() -> None:
    with settings_of(parser_of(__doc__).parse_args(), "heads") as settings:
        measure(settings)


if __name__ == "__main__":
    main()
