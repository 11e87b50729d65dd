"""`python -m minbert` is the `minbert` command."""

from minbert.cli import main

main()
