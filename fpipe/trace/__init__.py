"""Turns a function into a joint graph of its forward and backward; `chain` is the entrance."""
