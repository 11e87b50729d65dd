"""The `minbert` command: parse, call, print. Every command's work is in the module it imports.

minbert --help
"""

from minbert.cli import training, delivery, vectors, data  # noqa: F401, I001 - each adds its commands, in this order
from minbert.cli.base import app, main

__all__ = ["app", "main"]
