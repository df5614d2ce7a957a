"""`python -m kvdir`."""

from kvdir.cli.main import main

main()
