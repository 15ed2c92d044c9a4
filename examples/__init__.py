"""Uses of cellrt, one program a file: ``python examples/quickstart.py``."""
