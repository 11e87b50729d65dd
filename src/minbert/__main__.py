"""`python -m minbert` is the `minbert` command."""

from minbert.cli import main

if __name__ == "__main__":  # and not where another process only imports this
    main()
