"""All benchmarks of a GPU in one run: each part writes its JSON at once, and a table comes at the end.

python -m bench.gpu --data DIR                # about five minutes; writes results/bench/*-cuda.json
python -m bench.gpu --data DIR --only a,e     # some parts
python -m bench.gpu --device cpu --quick      # a few steps of everything, to see that it works

    a  training on the task mix, ours and a plain Hugging Face loop (bench.train)
    b  training on pairs, ours and sentence-transformers' trainer (bench.pairs)
    c  encoding (bench.encode)
    d  all heads from one encoding (bench.heads)
    e  utilisation, memory and time by texts a step (bench.scaling)
    f  time by the number of tasks (bench.scaling)
    i  loss curves of the fast and the plain path (bench.curves)
    j  profiles of both (bench.profile)
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench import curves, heads, pairs, profile, scaling, summary, train
from bench.settings import Settings, parser_of, settings_of


def encode(settings: Settings) -> None:
    """In a process of its own, as `make bench` runs it."""
    if importlib.util.find_spec("bench.encode") is None:
        raise RuntimeError("bench.encode is not there")
    options = ["--device", settings.device.type, "--out", str(settings.out)]
    options += ["--data", str(settings.data)] if settings.data else []
    options += [word for name, folder in settings.folders.items() for word in (f"--{name}", str(folder))]
    options += ["--quick"] if settings.quick else []
    # The Hugging Face loop switches the tokenizers' threads off for its workers: not for this.
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    subprocess.run([sys.executable, "-m", "bench.encode", *options], check=True, env=environment)


def profiles(settings: Settings) -> None:
    for kernels, model in (("plain", "minilm"), ("auto", "minilm"), ("auto", "mpnet")):
        profile.measure(settings, kernels, model)


PARTS: dict[str, tuple[str, Callable[[Settings], Any]]] = {
    "a": ("train", train.measure),
    "b": ("pairs", pairs.measure),
    "e": ("scaling", scaling.measure_texts),
    "f": ("scaling", scaling.measure_tasks),
    "c": ("encode", encode),
    "d": ("heads", heads.measure),
    "i": ("curves", curves.measure),
    "j": ("profile", profiles),
}
"""In the order of what is missed most if time runs out."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, for example a,e")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    failed = []
    with settings_of(arguments, "gpu") as settings:
        started = time.perf_counter()
        for part, (name, measure) in PARTS.items():
            if part not in chosen:
                continue
            before = time.perf_counter()
            command = settings.command.replace("bench.gpu", f"bench.{name}")
            try:
                measure(replace(settings, command=command))
            except Exception:  # the other parts are worth having all the same
                failed.append(part)
                traceback.print_exc()
            print(f"-- {part} {name}: {time.perf_counter() - before:.0f} s", flush=True)
        print(f"{time.perf_counter() - started:.0f} s in all{'; failed: ' + ', '.join(failed) if failed else ''}\n")
        print(summary.show(summary.write(settings.out)))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
