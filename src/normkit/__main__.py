"""`python -m normkit`."""

from normkit.cli.entry import main

if __name__ == "__main__":
    main()
