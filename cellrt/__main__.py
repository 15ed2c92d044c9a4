"""``python -m cellrt``: the same as ``cellrt``."""

from cellrt.cli import main

main()
