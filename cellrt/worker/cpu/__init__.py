"""Workers on the CPU."""
