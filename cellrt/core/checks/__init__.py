"""The rules that the tables keep, checked after every event of a test."""
