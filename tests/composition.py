"""What goes with which schedule: every feature on every family, beside plain torch.

    python -m tests.composition          the table of docs/composition.md, made anew
    python -m tests.composition --write  the same, written into the page

Each cell is a step of a small model in one process, uncompiled and in float64. It stands in the
table as a number of families, of those in its group, that gave what plain torch gives.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import fpipe
from fpipe import Schedule, schedules
from tests.models import apply, assert_same, mlp, pipe_of, unpipelined
from tests.transforms import grid

PAGE: Final = Path(__file__).parents[1] / "docs" / "composition.md"
BEGIN, END = "<!-- made by python -m tests.composition --write -->\n\n", "\n<!-- until here -->"
GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "one stage a rank": ("gpipe", "one_f_one_b", "eager_1f1b", "zb_h1", "zb_h2", "zb_auto"),
    "looped": ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "group_1f1b"),
    "V": ("zbv", "v_half", "v_min", "dualpipev"),
}

Feature = Callable[[Schedule], None]
"""Raises where a pipeline with this schedule gives something else than plain torch."""


def step(schedule: Schedule, *, rows: int = 8, **options: Any) -> None:
    model = mlp(schedule.num_stages, rows)
    ours = pipe_of(model, schedule, **options).step(model.params, model.batch)
    assert_same([ours.loss, ours.grads], list(unpipelined(*model)[:2]))


def different_sizes(schedule: Schedule) -> None:
    model = mlp(schedule.num_stages, 10)
    parts = [dict(zip(model.batch, each, strict=True)) for each in _split(model.batch)]
    ours = pipe_of(model, schedule).step(model.params, fpipe.Microbatches(parts))
    assert_same(list(ours[:2]), list(unpipelined(*model)[:2]))


def _split(batch: Mapping[str, Tensor]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(value.split([1, 4, 2, 3]) for value in batch.values()), strict=True))


def weighted(y: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    errors = (y - batch["y"]).square()
    return errors.sum(), torch.ones_like(errors).sum()


def aux(schedule: Schedule) -> None:
    model = mlp(schedule.num_stages, 8)

    def loss(y: Tensor, batch: Any) -> Any:
        return model.loss(y, batch), {"y": y}

    ours = pipe_of(model, schedule, loss=loss, has_aux=True).step(model.params, model.batch)
    assert_same(list(ours[:2]), list(unpipelined(*model)[:2]))
    assert_same(ours.aux["y"], apply(model.stages, model.params, model.batch))


def frozen(schedule: Schedule) -> None:
    model = mlp(schedule.num_stages, 8)
    pipe = pipe_of(model, schedule, trainable=lambda path: "w" in path)
    ours, theirs = pipe.step(model.params, model.batch), unpipelined(*model)
    assert_same([grad["w"] for grad in ours.grads], [grad["w"] for grad in theirs.grads])
    assert all(grad["b"] is None for grad in ours.grads)


def drawn(schedule: Schedule) -> None:
    model = mlp(schedule.num_stages, 8)

    def dropped(fn: Any, params: Any, x: Any, key: Tensor) -> Tensor:
        return fpipe.random.dropout(key, fn(params, x), 0.5)

    stages: Any = [fpipe.Stage(partial(dropped, fn), reads_key=True) for fn in model.stages]
    key = fpipe.random.key(1)
    ours = pipe_of(model._replace(stages=stages), schedule).step(model.params, model.batch, key=key)
    total = torch.zeros((), dtype=torch.float64)
    for number, rows in enumerate(zip(*(v.chunk(4) for v in model.batch.values()), strict=True)):
        part: Any = dict(zip(model.batch, rows, strict=True))
        x: Any = part
        for stage, (fn, params) in enumerate(zip(model.stages, model.params, strict=True)):
            folded = fpipe.random.fold_in(fpipe.random.fold_in(key, number), stage)
            x = dropped(fn, params, x, folded)
        total += model.loss(x, part) / 4
    assert_same(ours.loss, total)


def state(schedule: Schedule) -> None:
    module = nn.Sequential()
    for _ in range(schedule.num_stages):
        module.append(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()))
    module = module.double()
    x = torch.randn(8, 3, dtype=torch.float64)
    state = fpipe.nn.state_of(module)
    ours = _module_pipe(module, schedule, has_state=True).step(_params(module), state, {"input": x})
    for rows in x.chunk(4):  # as its microbatches go by
        module(rows)
    assert_same(fpipe.nn.buffers_of(ours.state), dict(module.named_buffers()))


def _module_pipe(module: nn.Sequential, schedule: Schedule, **options: Any) -> Any:
    return fpipe.from_module(
        module,
        schedule=schedule,
        cuts=[str(stage) for stage in range(schedule.num_stages - 1)],
        loss=lambda output, batch: output.square().mean(),
        compile=False,
        **options,
    )


def _params(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def module(schedule: Schedule) -> None:
    whole = nn.Sequential(*(nn.Linear(3, 3) for _ in range(schedule.num_stages))).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    ours = _module_pipe(whole, schedule).step(_params(whole), {"input": x})
    loss = whole(x).square().mean()
    loss.backward()
    assert_same(ours.loss, loss.detach())
    assert_same(ours.grads, {name: value.grad for name, value in whole.named_parameters()})


def function(schedule: Schedule) -> None:
    model = mlp(schedule.num_stages, 8)

    def whole(params: Any, batch: Any) -> Tensor:
        x: Any = batch
        for fn, own in zip(model.stages[:-1], params[:-1], strict=True):
            x = fpipe.cut(fn(own, x))
        return model.loss(model.stages[-1](params[-1], x), batch)

    ours = fpipe.pipeline(whole, schedule=schedule, compile=False).step(model.params, model.batch)
    assert_same(list(ours[:2]), list(unpipelined(*model)[:2]))


def evaluation(schedule: Schedule) -> None:
    model = mlp(schedule.num_stages, 8)
    pipe = pipe_of(model, schedule)
    assert_same(pipe.value(model.params, model.batch), unpipelined(*model).loss)
    expected = apply(model.stages, model.params, model.batch)
    assert_same(pipe.forward(model.params, model.batch), expected)


def trained(schedule: Schedule, **options: Any) -> None:
    model = mlp(schedule.num_stages, 8)
    params = fpipe_tree(model.params)
    trainer = fpipe.train(pipe_of(model, schedule), torch.optim.AdamW, lr=0.1, **options)
    after = trainer.step(params, trainer.init(params), model.batch).params
    grads = unpipelined(*model).grads
    leaves = [own[name].clone().requires_grad_() for own in model.params for name in own]
    for leaf, grad in zip(leaves, [g[name] for g in grads for name in g], strict=True):
        leaf.grad = grad
    if "max_norm" in options:
        torch.nn.utils.clip_grad_norm_(leaves, options["max_norm"], foreach=False)
    torch.optim.AdamW(leaves, lr=0.1, foreach=False).step()
    assert_same([own[name] for own in after for name in own], [leaf.detach() for leaf in leaves])


def fpipe_tree(params: Any) -> Any:
    return [{name: value.clone() for name, value in own.items()} for own in params]


def transformed(name: str) -> Feature:
    return lambda schedule: grid.check_transform(name, schedule)


FEATURES: Final[dict[str, Feature]] = {
    "a step": step,
    "rows that do not divide": partial(step, rows=7),
    "microbatches of different sizes, `fpipe.Microbatches`": different_sizes,
    '`remat="full"`': partial(step, remat="full"),
    '`remat="except_last"`': partial(step, remat="except_last"),
    '`reduction="weighted"`': partial(step, loss=weighted, reduction="weighted"),
    "`has_aux`": aux,
    "`trainable`": frozen,
    "keys of stages": drawn,
    "`has_state`, batch normalisation": state,
    "one function with `fpipe.cut`": function,
    "`fpipe.from_module`": module,
    "`pipe.value`, `pipe.forward`": evaluation,
    "`fpipe.train`": trained,
    "… `max_norm`, clipped": partial(trained, max_norm=0.01),
    "… `donate=True`": partial(trained, donate=True),
    "`fpipe.vmap`": transformed("vmap"),
    "`fpipe.per_example_grads`": transformed("per_example_grads"),
    "`fpipe.per_example_norms`": transformed("per_example_norms"),
    "`fpipe.jvp`": transformed("jvp"),
    "`fpipe.hvp`": transformed("hvp"),
    "`fpipe.ggnvp`": transformed("ggnvp"),
    "`fpipe.vmap` of `fpipe.hvp`": transformed("vmap of hvp"),
    "within `torch.func.grad`, twice": transformed("torch.func.grad twice"),
    "within `torch.func.vmap`": transformed("torch.func.vmap"),
}


def holds(feature: Feature, family: str) -> bool:
    """Whether a family gives what plain torch gives; what it raises is raised."""
    feature(schedules.get(family, ranks=2, microbatches=4))
    return True


def table() -> str:
    """A row for each feature, a column for each group of families."""
    lines = [f"| | {' | '.join(GROUPS)} |", f"|---|{'---|' * len(GROUPS)}"]
    for name, feature in FEATURES.items():
        cells = [
            f"{sum(holds(feature, family) for family in families)} of {len(families)}"
            for families in GROUPS.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/composition.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made = table()
    if not arguments.write:
        print(made)
        return
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
