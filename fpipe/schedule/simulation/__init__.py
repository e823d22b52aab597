"""The run of a schedule's rows under a cost, also where times vary.

`fpipe.schedule.simulator` is the way in.
"""
