"""`python -m opdcheck`."""

from opdcheck.cli import main

main()
