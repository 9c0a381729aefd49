"""Decoders by architecture. Each reads its weights by their Hugging Face names and computes over pages."""
