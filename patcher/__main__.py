"""`python -m patcher` is the command `patcher`."""

from patcher.cli import main

main()
