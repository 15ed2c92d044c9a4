"""``python -m cellrt.cli``."""

from cellrt.cli import main

main()
