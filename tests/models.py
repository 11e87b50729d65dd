"""Small models for tests, their weights far from the initial ones: a bias at 0 would hide that it was forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minbert.data.tokenizer import Tokenizer
from minbert.experiment import new_model
from minbert.model.manifest import Manifest
from minbert.model.multitask import MultitaskModel
from minbert.recipes import parse_recipe

THREE: dict[str, dict[str, Any]] = {"sst": {}, "quora": {}, "sts": {}}
TEXTS = [
    "The sun came out just as we reached the lake.",
    "nice",
    "Why does my printer leave streaks on the page?",
    "Researchers say it is as small as a fingernail, and that a newly found kind of frog is as small.",
    "a nice bonus",
]
PAIRS = [
    "A nice bonus, which came out just as we reached the lake, was the sun.",
    "How do I get better at chess?",
    "Why won't my printer connect to wifi?",
    "nice",
    "The sun",
]


def make(
    encoder: Path, tasks: Mapping[str, Any] = THREE, *, seed: int = 1, **model: Any
) -> tuple[Tokenizer, MultitaskModel, Manifest]:
    """A recipe's model in eval mode."""
    recipe = parse_recipe(
        {"name": "tiny", "seed": seed, "tasks": tasks, "model": {"encoder": str(encoder), "max_tokens": 64, **model}}
    )
    tokenizer, built, manifest = new_model(recipe, torch.device("cpu"))
    shake(built, seed)
    return tokenizer, built.eval(), manifest


def shake(module: nn.Module, seed: int = 1, by: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=by)
