"""Chains and loops while they run: what their next step reads, and what is given back at the end."""
