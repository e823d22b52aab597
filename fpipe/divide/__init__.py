"""One loss function with cuts: recorded whole, and divided into stages."""
