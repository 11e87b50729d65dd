"""A trained model as a folder, the one that every command takes.

model/
  minbert.json           format version, tasks with their labels, decisions, scores, where it came from
  heads.safetensors      the heads and the common layer
  encoder/               Hugging Face layout, tokenizer included: transformers loads it as it is
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from minbert import __version__
from minbert.atomic import atomic_folder, settle, write_text
from minbert.config import ModelConfig, parse_recipe
from minbert.data.tokenizer import Tokenizer
from minbert.errors import MinbertError, shown
from minbert.model.answers import Decision
from minbert.model.multitask import MultitaskModel
from minbert.model.pretrained import load_folder, save_encoder
from minbert.tasks import Task

FORMAT = 1
MANIFEST = "minbert.json"


@dataclass(frozen=True)
class Manifest:
    """What a model folder says of itself."""

    tasks: tuple[Task, ...]
    model: ModelConfig
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    """Temperature and threshold of each task, chosen on dev."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """Dev scores with intervals."""
    recipe: str = ""
    """The recipe's name."""
    data: str = ""
    """Where the recipe said its files are; "embedded" is the sample inside the package."""
    version: str = __version__


def build_model(manifest: Manifest, encoder: Any, *, generator: torch.Generator | None = None) -> MultitaskModel:
    """Heads around an encoder, as the manifest describes them."""
    config = manifest.model
    return MultitaskModel(
        encoder,
        manifest.tasks,
        pooling=config.pooling,
        dropout=config.dropout,
        common_layer=config.common_layer,
        common_dropout=config.common_dropout,
        common_tasks=config.common_tasks,
        generator=generator,
    )


def save_model(folder: Path, model: MultitaskModel, tokenizer: Tokenizer, manifest: Manifest) -> None:
    """Write the folder in one step; an older one of that name is replaced."""
    with atomic_folder(folder) as new:
        save_encoder(model.encoder, new / "encoder")
        tokenizer.save(new / "encoder")
        save_file(_head_tensors(model), new / "heads.safetensors")
        (new / MANIFEST).write_text(_to_json(manifest), encoding="utf-8")


def update_manifest(folder: Path, manifest: Manifest) -> None:
    write_text(folder / MANIFEST, _to_json(manifest))


def load_model(folder: Path, *, device: str = "cpu") -> tuple[MultitaskModel, Tokenizer, Manifest]:
    """The model in eval mode, its tokenizer and its manifest."""
    manifest = read_manifest(folder)
    encoder, _ = load_folder(folder / "encoder", dropout=manifest.model.encoder_dropout)
    model = build_model(manifest, encoder)
    path = folder / "heads.safetensors"
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise MinbertError(f"{shown(path)}: missing or damaged ({error})") from None
    expected = _head_tensors(model)
    wrong = sorted(set(found) ^ set(expected)) or [
        name for name in expected if found[name].shape != expected[name].shape
    ]
    if wrong:
        raise MinbertError(f"{shown(path)}: {wrong[0]} does not fit the tasks that {MANIFEST} lists")
    model.load_state_dict(found, strict=False)
    return model.to(device).eval(), Tokenizer.load(folder / "encoder"), manifest


def read_manifest(folder: Path) -> Manifest:
    settle(folder)
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        inner = folder / "model"
        hint = f" (did you mean {shown(inner)}?)" if (inner / MANIFEST).exists() else ""
        raise MinbertError(f"{shown(path)}: no such file{hint}; expected a model folder, such as RUN/model") from None
    except (ValueError, OSError) as error:
        raise MinbertError(f"{shown(path)}: not readable JSON ({error})") from None
    if not isinstance(raw, dict):
        raise MinbertError(f"{shown(path)}: a {type(raw).__name__}; expected an object")
    version = raw.get("format")
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        hint = "pip install -U minbert" if newer else "minbert train RECIPE makes a new one"
        raise MinbertError(f"{shown(path)}: format {version!r}; this minbert reads format {FORMAT}: {hint}")
    try:
        recipe = parse_recipe({"tasks": raw["tasks"], "model": raw["model"]}, shown(path))
        decisions = {name: Decision(**decision) for name, decision in raw["decisions"].items()}
        return Manifest(
            recipe.tasks, recipe.model, decisions, raw["scores"], raw["recipe"], raw["data"], raw["version"]
        )
    except KeyError as error:
        raise MinbertError(f"{shown(path)}: no {error}; expected what save_model writes") from None
    except (TypeError, AttributeError) as error:
        raise MinbertError(f"{shown(path)}: {error}; expected what save_model writes") from None


def _to_json(manifest: Manifest) -> str:
    def row(table: Any, *leave: str) -> dict[str, Any]:
        return {key: value for key, value in asdict(table).items() if value is not None and key not in leave}

    content = {
        "format": FORMAT,
        "version": manifest.version,
        "recipe": manifest.recipe,
        "data": manifest.data,
        "tasks": {task.name: row(task, "name") for task in manifest.tasks},
        "model": row(manifest.model),
        "decisions": {name: asdict(decision) for name, decision in manifest.decisions.items()},
        "scores": manifest.scores,
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _head_tensors(model: MultitaskModel) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if not name.startswith("encoder.")
    }
