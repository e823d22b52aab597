"""Orders of actions as a search handles them: the problem, a fast evaluator, greedy schedulers.

`phases/` and `searching/` import from here; here nothing knows that a search goes on.
"""
