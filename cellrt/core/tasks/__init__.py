"""What a task says: the rows that its inputs lie in, and those that its outputs get."""
