"""Checkpoints to resume from: everything that decides what comes next, in safetensors and JSON, no pickle.

    checkpoints/step-00000120/
      state.safetensors      model, optimizer, moving average, loss weights, gradient rule, random states
      state.json             where the run stands, the optimizer's settings, the best so far
    checkpoints/step-00000137-stopped/

The latter is of a run that was stopped between two checkpoints; the next one takes its place, so that in the end there
are those of a run that was not. A checkpoint is written to a temporary name, synced and renamed, so the newest one is always whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from minbert.atomic import atomic_folder
from minbert.errors import MinbertError, shown

FORMAT = 1
STOPPED = "-stopped"


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    modules: Mapping[str, nn.Module],
    optimizer: Optimizer,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
    stopped: bool = False,
) -> Path:
    """Write `folder`/step-N and remove all but the last `keep`, or step-N-stopped beside those.

    Args:
        modules: their parameters and buffers, by name.
        optimizer: its moments and its settings.
        tensors: further named tables of tensors (the moving average, what the gradient rule remembers).
        state: anything JSON can hold.
    """
    saved = optimizer.state_dict()
    flat = {
        f"module.{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()
    }
    flat |= {f"table.{name}.{key}": value for name, table in tensors.items() for key, value in table.items()}
    plain: dict[str, dict[str, Any]] = {}
    for index, entry in saved["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                flat[f"optimizer.{index}.{key}"] = value
            else:
                plain.setdefault(str(index), {})[key] = value
    flat["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        flat["random.cuda"] = torch.cuda.get_rng_state()
    content = {
        "format": FORMAT,
        "step": step,
        "optimizer": {"groups": saved["param_groups"], "state": plain},
        "state": state,
    }
    path = folder / f"step-{step:08d}{STOPPED if stopped else ''}"
    with atomic_folder(path) as new:
        save_file({name: value.detach().cpu().contiguous() for name, value in flat.items()}, new / "state.safetensors")
        (new / "state.json").write_text(json.dumps(content), encoding="utf-8")
    kept = [one for one in list_checkpoints(folder) if not one.name.endswith(STOPPED)][-keep:]
    for old in folder.glob("step-*"):  # also what is left of one whose removal was cut short
        if old not in kept and old != path:
            shutil.rmtree(old, ignore_errors=True)
    return path


def load_checkpoint(
    path: Path, *, modules: Mapping[str, nn.Module], optimizer: Optimizer, tensors: Mapping[str, dict[str, Tensor]]
) -> dict[str, Any]:
    """Put everything back where `save_checkpoint` took it from, random states included; returns its `state`.

    A tensor that its table does not have yet is added there, on the CPU.
    """
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        flat = load_file(path / "state.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise MinbertError(
            f"{shown(path)}: damaged checkpoint ({error}); remove it to resume from the one before"
        ) from None
    if content.get("format") != FORMAT:
        raise MinbertError(f"{shown(path)}: checkpoint format {content.get('format')}; this minbert reads {FORMAT}")

    def table(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in flat.items() if name.startswith(prefix)}

    for name, module in modules.items():
        module.load_state_dict(table(f"module.{name}."))
    for name, into in tensors.items():
        for key, value in table(f"table.{name}.").items():
            if key in into:
                into[key].copy_(value)
            else:
                into[key] = value
    state: dict[int, dict[str, Any]] = {int(key): dict(value) for key, value in content["optimizer"]["state"].items()}
    for name, value in table("optimizer.").items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": content["optimizer"]["groups"]})
    torch.set_rng_state(flat["random.cpu"])
    if "random.cuda" in flat and torch.cuda.is_available():
        torch.cuda.set_rng_state(flat["random.cuda"])
    return dict(content["state"])


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob("step-*/state.json"))
