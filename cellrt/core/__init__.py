"""The pure core: the graph of cells as integers in tables. No torch, no threads, no clock, no randomness."""
