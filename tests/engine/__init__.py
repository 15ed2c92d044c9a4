"""Tests of the engine with real threads, against ``cellrt.graph.reference``."""
