"""One loss function, recorded and divided at its cuts."""
