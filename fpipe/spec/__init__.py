"""The choices of a user: stages, parameters, the results of a loss, ranks, policies."""
