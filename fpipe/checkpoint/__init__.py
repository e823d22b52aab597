"""Read checkpoints: each process reads the tensors that it holds."""
