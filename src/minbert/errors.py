"""What goes wrong because of the input, told in one line; and optional dependencies, asked for by name."""

from __future__ import annotations

import importlib
import os
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class MinbertError(Exception):
    """A mistake in what we were given: what was found, what was expected, and where.

    The CLI prints the message on one line and exits with code 2; ``--debug`` shows the traceback.
    """


class MissingExtraError(MinbertError):
    """A feature was used whose optional dependencies are not installed."""


def require(module: str, extra: str, feature: str) -> ModuleType:
    """Import ``module``, or say which extra brings it: ``require("torch", "train", "training")``."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0]
        raise MissingExtraError(
            f"{feature} needs {package}, which is not installed: pip install 'minbert[{extra}]'"
        ) from error


def suggest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean "x"?)`` when something near is known, otherwise the empty string."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f' (did you mean "{near[0]}"?)' if near else ""


def shown(path: Path) -> str:
    """A path as a person would type it: relative when it lies below the current folder."""
    try:
        return os.fspath(path.resolve().relative_to(path.cwd()))
    except ValueError:
        return os.fspath(path)
