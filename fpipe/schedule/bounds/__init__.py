"""Lower bounds on the time of a step. Import `lower_bound` from `bounds.makespan`."""
