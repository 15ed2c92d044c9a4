"""Readers of checkpoints: folders of Hugging Face, and GGUF files. Each architecture has one small file."""

from cellrt.language.checkpoints.reading import read_checkpoint

__all__ = ["read_checkpoint"]
