"""Calls within autograd and within transforms of torch.func."""
