"""What happens when the rows of a schedule run under a cost, also where times vary.

`fpipe.schedule.simulator` is the way in.
"""
