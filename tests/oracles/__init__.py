"""Reference implementations that know nothing of the runtime: they decide what a right answer is."""
