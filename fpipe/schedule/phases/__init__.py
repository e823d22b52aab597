"""Phases of the search, each an iterator of small steps, and the portfolio that runs them."""
