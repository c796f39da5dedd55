"""`python -m normkit`."""

from normkit.cli.entry import main

main()
