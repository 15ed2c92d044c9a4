"""From a program, which is what an unfolder wrote, to a template: rows for the tables that fit every length."""
