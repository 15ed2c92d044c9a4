"""Which cell type, which of its ready rows, how many, whether to wait: Algorithm 1, and policies."""
