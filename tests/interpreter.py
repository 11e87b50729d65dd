"""Checks of Triton kernels without a GPU: they run in Triton's interpreter, in a child process.

    checks = Checks("tests.fused_checks")

    @checks.add
    def scatter(device): assert ...

    outcome = checks.run(["scatter"])["scatter"]       # None, or how it failed

The interpreter has to be switched on before Triton is imported, and stays on: hence the child. The same checks run
with real kernels where there is a GPU (`checks.table[name](torch.device("cuda"))`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

Check = Callable[[torch.device], None]
NO_TRITON = None if sys.platform == "linux" else "Triton is made for Linux only"
# Of kernels that share rows: on a GPU there are hundreds that take two at a time, each time a millisecond here.
PROGRAMS, ROWS = 3, 8


class Checks:
    """The checks of a module that can be run with `python -m`."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.table: dict[str, Check] = {}
        self.interpreted: list[str] = []
        """Those that the interpreter can run; a GPU runs all."""

    def add(self, check: Check) -> Check:
        self._add(check.__name__, check, interpreted=True)
        return check

    def add_each(
        self, cases: dict[str, Any], *, interpreted: bool = True
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """One check for each case: `check(device, *case)`."""

        def add(check: Callable[..., None]) -> Callable[..., None]:
            for name, case in cases.items():
                self._add(f"{check.__name__}-{name}", partial(_call, check, case), interpreted=interpreted)
            return check

        return add

    def _add(self, name: str, check: Check, *, interpreted: bool) -> None:
        if name in self.table:
            raise ValueError(f"two checks are named {name}")
        self.table[name] = check
        self.interpreted += [name] * interpreted

    def run(self, names: Iterable[str]) -> dict[str, str | None]:
        """Each check's failure, or None."""
        settings = {
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "ONEDNN_MAX_CPU_ISA": "AVX2",  # some processors die of the bf16 products that they advertise
        }
        command = [sys.executable, "-m", self.module, *names]
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=900)
        try:
            report = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            pytest.fail(f"the checks ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return report

    def main(self) -> None:
        """The child."""
        torch.set_num_threads(1)
        from minbert.model import kernels

        kernels.PROGRAMS, kernels.ROWS_BACK = PROGRAMS, ROWS
        report: dict[str, str | None] = {}
        for name in sys.argv[1:]:
            try:
                self.table[name](torch.device("cpu"))
                report[name] = None
            except Exception:
                report[name] = traceback.format_exc()
        print(json.dumps(report))


def _call(check: Callable[..., None], case: Any, device: torch.device) -> None:
    check(device, *(case if isinstance(case, tuple) else (case,)))
