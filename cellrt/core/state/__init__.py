"""All state of the scheduler: its tables, what their rows are, and the moves from one state to another."""
