"""Transforms of definitions: stages, loss and adapter replaced by transformed ones."""
