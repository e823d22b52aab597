"""A pipeline's call within autograd and within transforms of torch.func."""
