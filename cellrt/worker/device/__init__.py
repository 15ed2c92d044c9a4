"""Workers on GPUs, and the stand-in for a GPU in tests."""
