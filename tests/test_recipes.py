"""Every recipe in recipes/ can be read and trains: a few steps with a tiny encoder on tiny files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minbert.config import EMBEDDED, SAMPLE, Recipe, read_recipe
from minbert.experiment import train

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))
STAND_INS = {"classification": "sentiment", "pair-classification": "paraphrase", "pair-regression": "similarity"}


def on_the_sample(recipe: Recipe, encoder: Path) -> Recipe:
    """The same recipe over the embedded sample, for a few steps, and its stages likewise."""
    tasks = []
    for task in recipe.tasks:
        stem = STAND_INS.get(task.kind) or ("paraphrase" if task.is_pair else "sentiment")
        header = (SAMPLE / f"{stem}-dev.tsv").read_text().splitlines()[0].split("\t")
        label = header[-1] if task.has_label else ""
        files = {"train": (f"{stem}-dev.tsv",), "dev": (f"{stem}-dev.tsv",), "label": label}
        tasks.append(replace(task, **files))
    return replace(
        recipe,
        tasks=tuple(tasks),
        data=EMBEDDED,
        model=replace(recipe.model, encoder=str(encoder), max_tokens=64),
        training=replace(recipe.training, epochs=1, evaluate_every=0, train_sample=20),
        stages=tuple(on_the_sample(stage, encoder) for stage in recipe.stages),
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_a_recipe_trains(path: Path, tmp_path: Path, tiny_encoder: Path) -> None:
    recipe = on_the_sample(read_recipe(path), tiny_encoder)
    run = train(recipe, out=tmp_path / "run", device="cpu")
    assert set(run.results["dev"]) == {task.name for task in recipe.tasks}
    assert run.results["steps"] > 0
    assert list(run.results["stages"]) == [stage.name for stage in recipe.stages]
    assert all(stage["steps"] > 0 for stage in run.results["stages"].values())


def test_every_recipe_is_in_the_index() -> None:
    index = (ROOT / "recipes" / "README.md").read_text()
    assert [path.name for path in RECIPES if path.name not in index] == []
