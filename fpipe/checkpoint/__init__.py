"""Tensors in files, of which each process reads its own."""
