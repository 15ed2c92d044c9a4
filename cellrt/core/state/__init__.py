"""All state of the scheduler: its tables, the types of their rows, and the moves from one state to another."""
