"""The compilation of an unfolder's program to a template: rows for the tables that fit every length."""
