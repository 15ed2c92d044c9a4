"""What cellrt is used for, one program a file: ``python examples/quickstart.py``."""
