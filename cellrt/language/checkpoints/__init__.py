"""Checkpoints as others write them: folders of Hugging Face, and GGUF files. One small file an architecture."""

from cellrt.language.checkpoints.reading import read_checkpoint

__all__ = ["read_checkpoint"]
