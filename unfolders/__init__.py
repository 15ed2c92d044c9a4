"""Ready-made unfolders: one shape of cell graph a file."""
