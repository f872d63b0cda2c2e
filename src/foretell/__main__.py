"""`python -m foretell` is the `foretell` command."""

from foretell.cli.main import main

if __name__ == "__main__":
    main()
