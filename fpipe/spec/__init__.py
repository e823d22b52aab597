"""What a user declares of stages, of parameters and of what a loss returns."""
