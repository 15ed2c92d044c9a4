"""The engine in a process of its own: clients in any process unfold there, and hand over tensors in shared memory."""
