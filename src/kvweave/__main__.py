"""`python -m kvweave`: the `kvweave` command."""

from kvweave.cli import main

if __name__ == "__main__":
    main()
