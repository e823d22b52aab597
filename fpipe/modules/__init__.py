"""Pipelines of unmodified `torch.nn.Module`s."""
