"""Timelines and pictures of what an engine did."""
