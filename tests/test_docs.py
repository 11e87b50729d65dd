"""What the documents say is true: their examples run, their commands exist, their links lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from minbert.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ROADMAP.md", "recipes/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def test_the_examples_of_the_python_interface_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_encoder: Path
) -> None:
    """In order, in one namespace, with a tiny encoder in minilm's place so that it takes seconds."""
    shutil.copytree(tiny_encoder, tmp_path / "home" / "encoders" / "minilm")
    monkeypatch.setenv("MINBERT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python-api.md").read_text(), re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python-api.md", "exec"), names)
    assert names["vectors"].shape == (2, 32)  # type: ignore[attr-defined]


def test_the_example_of_own_data_runs(tiny_encoder: Path) -> None:
    """That of an export without minbert is run by test_export.py."""
    script = ROOT / "examples" / "own_data.py"
    done = subprocess.run([sys.executable, script, "--encoder", tiny_encoder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "urgency" in done.stdout


def test_the_recipes_of_your_data_can_be_read(tmp_path: Path) -> None:
    from minbert.recipes import read_recipe

    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "your-data.md").read_text(), re.DOTALL)
    expected = [["topic", "urgency"], ["quora", "sts"], ["sst"]]
    for block, tasks in zip(blocks, expected, strict=True):
        (tmp_path / "a.toml").write_text(block if "[tasks." in block else f"{block}\n[tasks.sst]\n")
        assert [task.name for task in read_recipe(tmp_path / "a.toml").tasks] == tasks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_in_a_page_exists(page: Path) -> None:
    root = typer.main.get_command(app)
    for line in re.findall(r"^\$ minbert (.+?)(?:\s+#.*)?$", page.read_text(), re.MULTILINE):
        words = line.split()
        command = root
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        assert command is not root, f"{page.name}: minbert {line}"
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, f"{page.name}: minbert {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_annotated_tree_names_real_files() -> None:
    tree = (ROOT / "README.md").read_text().split("## Where things are")[1]
    for folder in ("data", "model", "training", "evaluation", "delivery"):
        (part,) = re.findall(rf"^  {folder}/ (.*?)(?=^  \w|^\w)", tree, re.DOTALL | re.MULTILINE)
        for name in re.findall(r"\w+\.py", part):
            assert (ROOT / "src" / "minbert" / folder / name).exists(), f"{folder}/{name}"


def test_the_numbers_are_those_of_results() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.numbers", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_public_names_are_sorted_and_there() -> None:
    import minbert

    assert minbert.__all__ == sorted(minbert.__all__)
    assert all(callable(getattr(minbert, name)) for name in minbert.__all__)
