"""Machine code: how functions are compiled and kept, rows as types, and access to memory."""
