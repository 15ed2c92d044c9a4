"""Kernels: one package per operation, each with its plain torch reference."""
