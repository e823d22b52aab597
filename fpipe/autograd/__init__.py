"""Calls of a pipeline within autograd, transforms of torch.func and torch.compile.

The engine and `fpipe.transforms` use `levels` and `history`; the other modules serve these.
"""
