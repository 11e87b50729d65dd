"""`minbert doctor`: what this machine offers, and what we keep on it.

for finding in examine(): print(finding.what, finding.found)
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from minbert import __version__
from minbert.data.cache import TokenCache
from minbert.encoders import home
from minbert.machine import THREAD_SETTINGS, Precision, available_cores, cpu_model, probe, set_threads

TRIED: dict[str, tuple[Precision, ...]] = {"cpu": ("bf16",), "cuda": ("tf32", "bf16", "fp16")}
"""The formats that training can use on each device, beside fp32."""


@dataclass(frozen=True)
class Finding:
    """One line for a person to read."""

    what: str
    found: str
    good: bool = True


def examine() -> Iterator[Finding]:
    """Everything, one after the other; formats are tried anew, which takes seconds."""
    yield Finding("minbert", f"{__version__}, Python {platform.python_version()}")
    yield Finding("CPU", f"{cpu_model()[0]}, {available_cores()} of {os.cpu_count()} cores for us")
    if find_spec("torch") is None:
        yield Finding("torch", "not installed: pip install 'minbert[train]'", good=False)
    else:
        yield from _examine_torch()
    yield from _examine_caches()


def _examine_torch() -> Iterator[Finding]:
    import torch

    said = [f"{name}={os.environ[name]}" for name in THREAD_SETTINGS if os.environ.get(name)]
    yield Finding("torch", f"{torch.__version__}, threads: {set_threads()}{''.join(f', {one}' for one in said)}")
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    for number, gpu in enumerate(gpus):
        yield Finding(f"GPU {number}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    if not gpus:
        yield Finding("GPU", "none that torch sees")
    for precision in TRIED["cpu"]:
        found = probe(precision, "cpu", again=True)
        yield Finding(f"{precision} on the CPU", found.reason, found.works)
    for precision in TRIED["cuda"] if gpus else ():
        found = probe(precision, "cuda", again=True)
        yield Finding(f"{precision} on the GPU", found.reason, found.works)


def _examine_caches() -> Iterator[Finding]:
    yield Finding("encoders", f"{home() / 'encoders'}, {_gigabytes(_folder_size(home() / 'encoders'))}")
    cache = TokenCache.from_environment()
    if cache is None:
        yield Finding("tokens", "not kept: MINBERT_TOKEN_CACHE is off")
        return
    entries = cache.entries()
    size = _gigabytes(sum(entry.bytes for entry in entries))
    yield Finding("tokens", f"{cache.folder}, {len(entries)} sets, {size} of {_gigabytes(cache.limit)}")


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
