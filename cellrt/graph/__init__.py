"""Recording of requests: the unfolder, the graph it writes, its compact recorded form, and a reference that runs it."""
