"""What every benchmark can be told on the command line, in the same words."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bench.measure import Timing, machine
from bench.mix import Mix, find_data, pair_mix, task_mix
from bench.models import Model, find_model
from minbert.machine import choose_device

OUT = Path("results/bench")
QUICK = Timing(2, 2, 2)


@dataclass(frozen=True)
class Settings:
    device: torch.device
    work: Path
    """For random weights; removed at the end."""
    out: Path = OUT
    data: Path | None = None
    """Folder of the real datasets; None: the embedded sample."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Where an encoder lies, by name."""
    sets: tuple[str, ...] = ()
    """Changes of our recipe, as `minbert train --set` takes them."""
    quick: bool = False
    """Two steps of everything: shows that it works, measures nothing."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """Of every part's `Timing`, by field."""
    command: str = ""

    def timing(self, **by_device: Timing) -> Timing:
        """The one for this device, shortened if it is to be quick."""
        return replace(QUICK if self.quick else by_device[self.device.type], **self.changes)

    def model(self, name: str) -> Model:
        return find_model(name, self.work, self.folders.get(name), self.folders.get("minilm"))

    def task_mix(self, model: Model) -> Mix:
        return _task_mix(model.folder, self.data, self.sets)

    def pair_mix(self, model: Model) -> Mix:
        return pair_mix(model.folder, self.data, self.sets)

    def about(self) -> dict[str, Any]:
        """What stands in every file."""
        return {
            "precision": "bf16 autocast" if self.device.type == "cuda" else "fp32",
            "quick": self.quick,
            "set": list(self.sets),
            "command": self.command,
            "environment": machine(self.device),
        }


_task_mix = cache(task_mix)  # tokenizing the mix takes seconds, and several parts use it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--data", type=Path, help='folder of the real datasets, or "embedded"; default $SHARED/data')
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the JSON files")
    parser.add_argument("--minilm", type=Path, help="folder of the encoder, or of its tokenizer alone")
    parser.add_argument(
        "--mpnet", type=Path, help="the same for mpnet; default random weights with minilm's vocabulary"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="change our recipe, for example training.kernels=plain"
    )
    parser.add_argument("--warm-up", type=int, help="steps of ours before the first that is timed")
    parser.add_argument("--rounds", type=int, help="of a run, each timed as a whole")
    parser.add_argument("--steps", type=int, help="of a round")
    parser.add_argument("--repeats", type=int, help="runs of each contender, taking turns")
    parser.add_argument("--threads", type=int, help="of torch, for every contender")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it works")


@contextmanager
def settings_of(arguments: argparse.Namespace, name: str) -> Iterator[Settings]:
    """The settings of one run, with a folder that is removed when it is over."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = choose_device(arguments.device)
    words = [f"python -m bench.{name} --device {device.type}"]
    words += ["--data DIR"] if arguments.data else []
    words += ["--quick"] if arguments.quick else []
    words += [f"--set {setting}" for setting in arguments.set]
    changes = {name: getattr(arguments, name) for name in ("warm_up", "rounds", "steps", "repeats")}
    words += [f"--{name.replace('_', '-')} {value}" for name, value in changes.items() if value is not None]
    given = {name: getattr(arguments, name) for name in ("minilm", "mpnet") if getattr(arguments, name)}
    with tempfile.TemporaryDirectory() as work:
        yield Settings(
            device=device,
            work=Path(work),
            out=arguments.out,
            data=find_data(arguments.data),
            folders=given,
            sets=tuple(arguments.set),
            quick=arguments.quick,
            changes={name: value for name, value in changes.items() if value is not None},
            command=" ".join(words),
        )


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser with the common arguments, whose help is the module's own text."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return parser
