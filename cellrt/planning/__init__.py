"""Capacity planning: a model's cost on a device, the load it bears, and how many workers a load needs."""
