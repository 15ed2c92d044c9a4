"""Tests of what a user writes: cells, cell files and unfold functions."""
