"""Benchmarks: ``python -m benchmarks NAME`` measures one question against named baselines in the same run."""
