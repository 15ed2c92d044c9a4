"""Language models read from checkpoints in the common formats."""
