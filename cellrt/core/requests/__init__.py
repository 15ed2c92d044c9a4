"""The begin and the end of a request, and what a session keeps between two."""
