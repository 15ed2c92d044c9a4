"""The contents of a task: the rows that its inputs lie in, and those that its outputs are stored to."""
