"""What happens when a task is done, or its worker is lost."""
