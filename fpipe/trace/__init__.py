"""A function becomes a joint graph of its forward and backward."""
