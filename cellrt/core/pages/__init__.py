"""Growing states: which pages they have, which are copied to the host or dropped, and how they come back."""
