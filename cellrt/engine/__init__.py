"""The driver of the core: the engine, its turns, requests, sessions, registry and futures."""
