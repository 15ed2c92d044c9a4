"""Tests of the engine with real threads, against ``cellrt.reference``."""
