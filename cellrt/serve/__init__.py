"""The doors of the network: HTTP and gRPC in front of an engine in a process of its own; ``cellrt serve``."""
