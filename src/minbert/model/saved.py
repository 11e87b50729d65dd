"""A trained model as a folder, the one that every command takes.

model/
  minbert.json           format version, tasks with their labels, decisions, scores, where it came from
  heads.safetensors      the heads and the common layer
  encoder/               Hugging Face layout, tokenizer included: transformers loads it as it is

An ensemble is a folder of such folders, with a minbert.json of its own that names them:

model/
  minbert.json           the same, and "members"
  members/1/             a model's folder, as above
  members/2/
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from minbert.atomic import atomic_folder, settle
from minbert.data.tokenizer import Tokenizer
from minbert.errors import MinbertError, shown
from minbert.model.manifest import MANIFEST, Manifest, read_manifest, to_json
from minbert.model.multitask import MultitaskModel
from minbert.model.pretrained import load_folder, save_encoder


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
        (new / MANIFEST).write_text(to_json(manifest), encoding="utf-8")


def save_ensemble(folder: Path, models: Sequence[Path], manifest: Manifest) -> Manifest:
    """Write an ensemble's folder in one step; returns its manifest. The members' files are hard links where the disk
    allows it, which take no room, and copies elsewhere: every writer here replaces files and never changes them."""
    manifest = replace(manifest, members=tuple(f"members/{number}" for number in range(1, len(models) + 1)))
    with atomic_folder(folder) as new:
        for model, name in zip(models, manifest.members, strict=True):
            settle(model)
            shutil.copytree(model, new / name, copy_function=_link)
        (new / MANIFEST).write_text(to_json(manifest), encoding="utf-8")
    return manifest


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another disk, or one that knows no links
        shutil.copy2(source, target)


def load_model(folder: Path, *, device: str = "cpu") -> tuple[MultitaskModel, Tokenizer, Manifest]:
    """The model in eval mode, its tokenizer and its manifest."""
    manifest = read_manifest(folder)
    if manifest.members:
        raise MinbertError(f"{shown(folder)}: an ensemble of {len(manifest.members)} models; expected a single one")
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


def _head_tensors(model: MultitaskModel) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if not name.startswith("encoder.")
    }
