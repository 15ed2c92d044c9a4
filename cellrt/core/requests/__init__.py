"""The begin and the end of a request, and the state that a session keeps between two requests."""
