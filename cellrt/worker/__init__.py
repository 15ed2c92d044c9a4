"""Workers: one device each, an in-order stream of tasks, and a counter that says how many are done."""
