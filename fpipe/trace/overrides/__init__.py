"""Functions of torch that a trace replaces by others: opaque ones, and those that read data."""
