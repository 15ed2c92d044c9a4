"""Benchmarks: ``python -m benchmarks NAME`` measures one question against named baselines in the same run."""

import os

# What is to run compiled says so: nothing is compiled beside what is timed.
os.environ.setdefault("CELLRT_COMPILE", "off")
