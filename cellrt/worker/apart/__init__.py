"""CPU workers whose cells run in a process of their own."""
