"""Compiled forms for any cell: its step exported with ``torch.export`` and compiled by AOTInductor for a CPU."""
