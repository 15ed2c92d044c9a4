"""The network interfaces: HTTP and gRPC in front of an engine in a process of its own; ``cellrt serve``."""
