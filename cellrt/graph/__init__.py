"""What a request is: the unfolder, the graph it writes, how it is recorded, and the oracle that runs it."""
