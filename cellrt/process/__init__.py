"""The engine in a process of its own. Clients in any process unfold there, and pass tensors in shared memory."""
