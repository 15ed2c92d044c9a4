"""The rules that the tables keep, looked through after every event of a test."""
