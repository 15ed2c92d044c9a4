"""What becomes machine code here: how functions are compiled and kept, rows as types, and reading memory."""
