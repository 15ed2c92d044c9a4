"""The completion of tasks, and the loss of workers."""
