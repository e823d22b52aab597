"""The user's declarations of stages, of parameters and of the results of a loss."""
