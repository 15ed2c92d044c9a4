"""Chores of the repository that are more than a line of the Makefile: what is generated for the documentation."""
