"""The choice of a cell type and of the ready rows of a task, or to wait: Algorithm 1, and policies."""
