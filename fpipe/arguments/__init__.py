"""The caller's trees, flat and split, and their shapes."""
