"""A notebook of all that shows itself as a picture or a table, executed and written as HTML."""

import subprocess
import sys
from pathlib import Path

import nbformat

CELLS = [
    "import torch\nimport fpipe",
    "schedule = fpipe.schedules.zbv(ranks=4, microbatches=32)\nschedule",
    "cost = fpipe.Cost(f=10, i=12, w=8, comm=1)\ncost",
    "fpipe.simulate(schedule, cost)",
    "fpipe.search(ranks=4, microbatches=8, cost=cost, memory=4, iterations=200)",
    """module = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=4)
example = {"input": torch.randn(8, 16)}
pipe = fpipe.from_module(
    module, schedule=schedule, stages=2, example=example, compile=False,
    loss=lambda output, batch: output.square().mean(),
)
pipe.balance""",
    """params = {name: parameter.detach() for name, parameter in module.named_parameters()}
with fpipe.record() as recording:
    pipe.step(params, example)
recording""",
    "pipe.programs(params, example)[0]",
]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
nbformat.write(notebook, "shown.ipynb")
command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", "shown.ipynb"]
subprocess.run(command, check=True, capture_output=True)
page = Path("shown.html").read_text("utf-8")
pictures, tables = page.count('role="img"'), page.count("<caption")
print(f"{len(CELLS)} cells, {pictures} pictures, {tables} tables, {len(page) // 1000} kB of HTML")
assert pictures >= 5 and tables >= 4
