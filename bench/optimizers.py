"""A step of our AdamW and of torch's, foreach and fused, over minilm's parameters, interleaved, in one run.

python -m bench.optimizers            # writes results/bench/optimizers.json
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from pathlib import Path

import torch

from minbert.evaluation.results import commit
from minbert.model.pretrained import load_encoder
from minbert.training.optimizers import AdamW

STEPS, WARM_UP = 60, 5


def main() -> None:
    def parameters() -> list[torch.nn.Parameter]:
        found = list(load_encoder("minilm").parameters())
        generator = torch.Generator().manual_seed(1)
        for parameter in found:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        return found

    settings = {"lr": 1e-5, "weight_decay": 0.01}
    contenders = {
        "ours": AdamW(parameters(), **settings),  # type: ignore[arg-type]
        "peer": torch.optim.AdamW(parameters(), foreach=True, **settings),  # type: ignore[arg-type]
        "fused": torch.optim.AdamW(parameters(), fused=True, **settings),  # type: ignore[arg-type]
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(STEPS):
        for name, optimizer in contenders.items():
            started = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - started)
    rates = {name: 1 / statistics.median(found[WARM_UP:]) for name, found in seconds.items()}
    content = {
        "figure": "AdamW step on minilm's parameters, ours / torch.optim.AdamW(foreach=True)",
        **rates,
        "unit": "steps/s",
        "ratio": rates["ours"] / rates["peer"],
        "ratio_to_fused": rates["ours"] / rates["fused"],
        "target": 1 / 1.15,
        "threads": torch.get_num_threads(),
        "device": platform.processor() or platform.machine(),
        "commit": commit(),
        "command": "python -m bench.optimizers",
    }
    path = Path("results/bench/optimizers.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"ours {rates['ours']:.1f} steps/s, foreach {rates['peer']:.1f}, fused {rates['fused']:.1f}")
    print(f"ours / foreach {content['ratio']:.2f}, ours / fused {content['ratio_to_fused']:.2f}")


if __name__ == "__main__":
    main()
