"""What one looks at: timelines and pictures."""
