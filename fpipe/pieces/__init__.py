"""A joint graph becomes the callables F, B, I and W that a schedule runs."""
