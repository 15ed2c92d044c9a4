"""Who drives: the engine, its turns, requests, sessions, registry and futures."""
