"""Checkpoints: each process reads and writes the tensors that it holds."""
