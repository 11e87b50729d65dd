"""Papers of three rows, and settings with which nothing is trained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minbert.reproduction.jobs import Settings
from minbert.reproduction.recipes import Paper, find_papers
from tests.reproduction.made_up import PRETENDER, ROOT, ROWS


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    for name, text in ROWS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def papers(recipes: Path) -> dict[str, Paper]:
    return find_papers(recipes)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    script = tmp_path / "pretender.py"
    script.write_text(PRETENDER.replace("SOURCE", repr(str(ROOT / "src"))), encoding="utf-8")
    return Settings(
        "/home/me/encoders/tiny",
        results=tmp_path / "results",
        runs=tmp_path / "runs",
        trainer=(sys.executable, str(script)),
        poll=0.02,
        replace=True,
    )
