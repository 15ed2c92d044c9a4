"""Running chains and loops: what their next step reads, and which rows are given back at the end."""
