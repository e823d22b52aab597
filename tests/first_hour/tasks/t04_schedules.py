"""A schedule is printed, simulated, searched and drawn; nothing of torch is needed."""

from pathlib import Path

import fpipe

schedule = fpipe.schedules.zbv(ranks=4, microbatches=8)
print(schedule)
cost = fpipe.Cost(f=10, i=12, w=8, comm=1)
timeline = fpipe.simulate(schedule, cost)
print(timeline)
found = fpipe.search(ranks=4, microbatches=8, cost=cost, memory=4, iterations=300)
print(found)
fpipe.verify(found.schedule)
assert fpipe.simulate(found.schedule, cost).makespan <= timeline.makespan
found.timeline.to_svg("found.svg")
found.timeline.to_html("found.html")
print(*sorted(path.name for path in Path().glob("found.*")))
