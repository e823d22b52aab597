"""Each rank makes and reads the parameters of its own stages, and trains as one process does."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

import fpipe
from fpipe import Schedule, pytree, random, schedules
from fpipe.checkpoint import checkpoint_files
from fpipe.nn import buffers_of, state_of
from tests import keyed_model, state_model
from tests.distributed.actors import over, recorded_module
from tests.distributed.crew import Crew, mesh_of, values
from tests.models import assert_identical, mlp
from tests.modules import normed
from tests.modules.helpers import detached, squares
from tests.modules.models import CUTS, LanguageModel, language_model, token_batch

Group = dist.ProcessGroup | None


def normal(key: Tensor, name: str, like: Tensor) -> Tensor:
    return random.normal(key, like.shape, like.dtype)


@cache
def _weightless() -> fpipe.ModulePipeline:
    with torch.device("meta"):
        module = LanguageModel().double()
    buffers = {"mask": language_model().mask}
    schedule = schedules.gpipe(ranks=4, microbatches=1)
    return fpipe.from_module(module, schedule=schedule, cuts=CUTS, buffers=buffers, compile=False)


def weightless(group: Group, schedule: Schedule) -> fpipe.ModulePipeline:
    """Of a module without weights; those of a process share their recordings."""
    return over(_weightless(), schedule, group)


class Trained(NamedTuple):
    """Where parameters came from, and two steps.

    Attributes:
        params: before the first step.
        read: names of the tensors that were read from files, in order.
        steps: loss and gradients.
        loaded: all parameters afterwards, in one module.
    """

    params: dict[str, Tensor]
    read: list[str]
    steps: list[fpipe.Step]
    loaded: dict[str, Tensor]


def train_held(group: Group, schedule: Schedule, path: Path | None) -> Trained:
    """From a key, or from a checkpoint."""
    pipe, batch = weightless(group, schedule), token_batch()
    read: list[str] = []
    if path is None:
        shapes = {name: value.to("meta") for name, value in batch.items()}
        params = pipe.init(normal, random.key(3), shapes)
    else:
        with pytest.MonkeyPatch.context() as patch:
            note_reads(patch, read)
            params = pipe.load(path, batch)
    first, steps = params, []
    for _ in range(2):
        steps.append(pipe.step(params, batch))
        params = {
            name: value if (grad := steps[-1].grads[name]) is None else value - 0.1 * grad
            for name, value in params.items()
        }
    target = language_model()
    pipe.load_into(target, params)
    return Trained(first, read, steps, detached(target))


MOMENTS = ("exp_avg", "exp_avg_sq")


def optimised(
    group: Group, schedule: Schedule, folder: Path, steps: int, resume: bool
) -> dict[str, Tensor]:
    """Steps of AdamW from a module's own parameters, or from what was saved; all parameters.

    Each process that is one of a group saves its own at the end.
    """
    module, batch, pipe = language_model(), token_batch(), recorded_module(group, schedule)
    params: dict[str, Tensor] = dict(module.named_parameters())
    if resume:
        params = pipe.load(folder / "params", batch)
    elif group is not None:
        with pytest.raises(fpipe.BatchError, match=r"is not known before .* pipe\.programs\("):
            pipe.own(params)
        pipe.programs(params, batch)
    own = pipe.own(params)
    optimizer = torch.optim.AdamW(own.values(), 0.01)
    if resume:
        moments = {m: pipe.own(pipe.load(folder / m, batch)) for m in MOMENTS}
        for name, p in own.items():
            states = {m: moments[m][name] for m in MOMENTS}
            optimizer.state[p] = {"step": torch.tensor(float(steps)), **states}
    for _ in range(steps):
        grads = pipe.step(params, batch).grads
        for name, p in own.items():
            p.grad = grads[name]
        optimizer.step()
    if group is not None:
        assert pipe.own(grads).keys() == own.keys()
        with pytest.raises(fpipe.BatchError, match="params has another structure"):
            pipe.own(own)
        dcp.save(own, checkpoint_id=folder / "params", process_group=group)
        for moment in MOMENTS:
            found = {name: optimizer.state[p][moment] for name, p in own.items()}
            dcp.save(found, checkpoint_id=folder / moment, process_group=group)
        assert len(own) < len(params)
    target = language_model()
    pipe.load_into(target, own)
    return detached(target)


def test_a_run_goes_on_on_another_number_of_processes(crew: Crew, tmp_path: Path) -> None:
    """Processes saved parameters of others as they were before they were trained."""
    schedule = schedules.zbv(ranks=2, microbatches=4)
    parts = values(crew.run(optimised, schedule, tmp_path, 2, False, ranks=range(2)))
    assert_identical(parts[0], parts[1])
    alone = schedules.zbv(ranks=2, microbatches=4)
    assert_identical(parts[0], optimised(None, alone, tmp_path, 2, False))
    found = optimised(None, alone, tmp_path, 2, True)
    assert_identical(found, optimised(None, alone, tmp_path, 4, False))


def placed(group: Group, schedule: Schedule) -> tuple[set[str], set[str], fpipe.Step]:
    """The names of what a process keeps of all parameters, and of what it does not, and a step."""
    module, batch, pipe = language_model(), token_batch(), recorded_module(group, schedule)
    whole = dict(module.named_parameters())
    params = pipe.place(whole, batch)
    bare = {name for name, p in params.items() if p.is_meta}
    own = pipe.own(params)
    assert all(p is whole[name] and p.requires_grad for name, p in own.items())
    return set(own), bare, pipe.step(params, batch)


def test_parameters_that_are_there_are_placed(crew: Crew) -> None:
    schedule = schedules.interleaved_1f1b(ranks=2, microbatches=4)
    _, none, expected = placed(None, schedule)
    assert not none
    for own, bare, (loss, grads) in values(crew.run(placed, schedule, ranks=range(2))):
        assert own and bare and own | bare == grads.keys() and not own & bare
        assert_identical(loss, expected.loss)
        for name in own:
            assert_identical(grads[name], expected.grads[name])


def own_of_stages(group: Group) -> list[str]:
    """Names of a process's own parameters, and of gradients, of a list of stages."""
    model = mlp(2, 4)
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False, group=group)
    grads = pipe.step(pipe.local(model.params), model.batch).grads
    assert list(pipe.own(grads)) == list(pipe.own(model.params))
    return list(pipe.own(grads))


def test_own_parameters_of_a_list_of_stages(crew: Crew) -> None:
    first, second = values(crew.run(own_of_stages, ranks=range(2)))
    assert first == ["0.b", "0.w"] and second == ["1.b", "1.w"]
    assert own_of_stages(None) == first + second


def nested(params: Any, state: Any, batch: Tensor) -> Any:
    first, second = params["first"], params["rest"][0]
    x = fpipe.cut(torch.tanh(batch @ first["w"]))
    return (x @ second).square().mean(), {"seen": state["seen"] + 1}


def own_of_nested(group: Group) -> list[list[str]]:
    """Names of parameters and gradients of one function with a state, and of two members."""
    pipe = fpipe.pipeline(
        nested,
        schedule=schedules.gpipe(ranks=2, microbatches=2),
        has_state=True,
        compile=False,
        group=group,
    )
    params: Any = {"first": {"w": torch.eye(3), "bias": None}, "rest": [torch.ones(3, 3)]}
    state, batch = {"seen": torch.zeros(())}, torch.ones(4, 3)
    found = []
    for own in (pipe, fpipe.vmap(pipe)):
        if own is not pipe:
            stacked = pytree.tree_map(lambda p: p.expand(2, *p.shape), (params, state))
            params, state = stacked
        grads = own.step(params, state, batch).grads
        found += [list(own.own(params)), list(own.own(grads))]
    return found


def test_own_parameters_of_a_nested_tree(crew: Crew) -> None:
    first, second = values(crew.run(own_of_nested, ranks=range(2)))
    assert first == [["first.w"]] * 4 and second == [["rest.0"]] * 4
    assert own_of_nested(None) == [["first.w", "rest.0"]] * 4


def note_reads(patch: pytest.MonkeyPatch, read: list[str]) -> None:
    """Note the names of tensors that are read from files of either kind."""
    really, opened = dcp.FileSystemReader.read_data, checkpoint_files._opened

    def read_data(reader: Any, plan: Any, planner: Any) -> Any:
        read.extend(item.dest_index.fqn for item in plan.items)
        return really(reader, plan, planner)

    class Noted:
        def __init__(self, file: Path) -> None:
            self.file = opened(file)
            self.keys, self.get_slice = self.file.keys, self.file.get_slice

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            value: Tensor = self.file.get_tensor(name)
            return value

    patch.setattr(dcp.FileSystemReader, "read_data", read_data)
    patch.setattr(checkpoint_files, "_opened", Noted)


@pytest.mark.parametrize("kind", ["key", "safetensors", "distributed"])
def test_ranks_hold_what_they_read_and_train_as_one_process(
    kind: str, crew: Crew, tmp_path: Path
) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    path: Path | None = tmp_path
    if kind == "key":
        path = None
    elif kind == "safetensors":
        save_file(detached(language_model()), tmp_path / "model.safetensors")
    else:
        with pytest.warns(UserWarning, match="to save in a single process"):
            dcp.save(language_model().state_dict(), checkpoint_id=tmp_path, no_dist=True)
    crew.start(train_held, schedule, path, ranks=range(2))
    whole = train_held(None, schedule, path)
    parts: list[Trained] = values(crew.collect())
    assert not any(value.is_meta for value in whole.params.values())
    # Stages 0 and 3 lie on rank 0, where the table is read at both ends, and 1 and 2 on rank 1.
    inner = {name for name in whole.params if name.startswith(("blocks.1", "blocks.2"))}
    for part, own in zip(parts, (whole.params.keys() - inner, inner), strict=True):
        real = {name for name, value in part.params.items() if not value.is_meta}
        assert real == own
        assert_identical({n: part.params[n] for n in own}, {n: whole.params[n] for n in own})
        if path is not None:
            # It has both names of the table, which must agree.
            tied = {"head.weight"} if kind == "distributed" and "embedding.weight" in own else set()
            assert sorted(part.read) == sorted(own | tied)
        assert_identical(part.loaded, whole.loaded)
    for number, step in enumerate(whole.steps):
        merged: dict[str, Any] = {}
        for part in parts:
            assert_identical(part.steps[number].loss, step.loss)
            merged |= {n: g for n, g in part.steps[number].grads.items() if g is not None}
        assert_identical(merged, step.grads)


def make_on_a_mesh(group: Group, mesh: bool) -> tuple[set[str], Tensor]:
    """The names of what this rank makes, and the loss; each row of a mesh is a pipeline."""
    with torch.device("meta"):
        module = LanguageModel(blocks=2).double()
    pipe = fpipe.from_module(
        module,
        schedule=schedules.one_f_one_b(ranks=2, microbatches=2),
        cuts=["blocks.0"],
        buffers={"mask": language_model().mask},
        compile=False,
        mesh=mesh_of((2, 2), ("dp", "pp")) if mesh else None,
    )
    params = pipe.init(normal, random.key(3), token_batch())
    real = {name for name, value in params.items() if not value.is_meta}
    return real, pipe.value(params, token_batch())


def test_ranks_of_a_mesh_hold_what_their_row_gives_them(crew: Crew) -> None:
    crew.start(make_on_a_mesh, True)
    names, expected = make_on_a_mesh(None, False)
    inner = {name for name in names if name.startswith("blocks.0")}
    outer = {name for name in names if name.startswith("blocks.1")}
    for rank, (real, loss) in enumerate(values(crew.collect())):
        assert real == names - (inner if rank % 2 else outer)
        assert_identical(loss, expected)


def save(group: dist.ProcessGroup, schedule: Schedule, path: Path) -> dict[str, Tensor]:
    """Every rank saves what it holds; returns all of it."""
    pipe = weightless(group, schedule)
    params = pipe.init(normal, random.key(3), token_batch())
    own = {name: value for name, value in params.items() if not value.is_meta}
    dcp.save(own, checkpoint_id=path, process_group=group)
    target = language_model()
    pipe.load_into(target, params)
    return detached(target)


def load(group: Group, schedule: Schedule, path: Path) -> fpipe.Step:
    """A step from there."""
    pipe, batch = weightless(group, schedule), token_batch()
    step: fpipe.Step = pipe.step(pipe.load(path, batch), batch)
    return step


def test_what_two_ranks_save_is_loaded_by_four_and_by_one(crew: Crew, tmp_path: Path) -> None:
    # Both ranks hold the table that is read in the first stage and in the last.
    two = schedules.interleaved_1f1b(ranks=2, microbatches=4, stages_per_rank=2)
    saved, same = values(crew.run(save, two, tmp_path, ranks=range(2)))
    assert_identical(saved, same)
    four = schedules.zb_h1(ranks=4, microbatches=4)
    crew.start(load, four, tmp_path)
    expected = load(None, four, tmp_path)
    assert_identical(weightless(None, four).load(tmp_path), saved)
    merged: dict[str, Any] = {}
    for step in values(crew.collect()):
        assert_identical(step.loss, expected.loss)
        merged |= {name: grad for name, grad in step.grads.items() if grad is not None}
    assert_identical(merged, expected.grads)


def stage(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"])


def stages(group: Group, schedule: Schedule) -> tuple[list[str], Any, fpipe.Step]:
    """Functions as stages: the names that were made, the parameters, and a step."""
    pipe = fpipe.pipeline([stage] * 4, squares, schedule, compile=False, group=group)
    made: list[str] = []

    def init_fn(key: Tensor, name: str, like: Tensor) -> Tensor:
        made.append(name)
        return normal(key, name, like)

    shapes = [{"w": torch.empty(3, 3, dtype=torch.float64, device="meta")} for _ in range(4)]
    params = pipe.init(init_fn, random.key(3), shapes=shapes)
    return made, params, pipe.step(params, torch.ones(8, 3, dtype=torch.float64))


def test_ranks_make_their_own_stages(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=2)
    crew.start(stages, schedule, ranks=range(2))
    made, params, step = stages(None, schedule)
    assert made == ["0.w", "1.w", "2.w", "3.w"]
    for own, (here, theirs, part) in zip([(0, 3), (1, 2)], values(crew.collect()), strict=True):
        assert here == [f"{index}.w" for index in own]
        assert [index for index, entry in enumerate(theirs) if entry is not None] == list(own)
        for index in own:
            assert_identical(theirs[index], params[index])
            assert_identical(part.grads[index], step.grads[index])
        assert_identical(part.loss, step.loss)


def with_state_held(group: Group, schedule: Schedule) -> tuple[dict[str, Tensor], fpipe.StepState]:
    """One function with cuts and a state: the shapes of both are enough to make parameters."""
    pipe = fpipe.pipeline(
        state_model.without_aux, schedule=schedule, has_state=True, compile=False, group=group
    )
    state, batch = state_model.make_state(), state_model.make_batch()
    on_meta = partial(pytree.tree_map, lambda leaf: leaf.to("meta"))
    shapes = on_meta(state_model.make_params())
    params = pipe.init(normal, random.key(3), on_meta(state), on_meta(batch), shapes=shapes)
    return params, pipe.step(params, state, batch)


def with_key(group: Group, schedule: Schedule) -> fpipe.Step:
    """The example is what a step takes, its key included."""
    pipe = fpipe.pipeline(
        keyed_model.loss_fn, schedule=schedule, has_key=True, compile=False, group=group
    )
    model = mlp(4, 4)
    shapes = pytree.tree_map(lambda leaf: leaf.to("meta"), model.params)
    key = random.key(3)
    return pipe.step(pipe.init(normal, key, model.batch, key, shapes=shapes), model.batch, key)


def test_ranks_make_what_a_function_with_a_key_reads(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=2)
    crew.start(with_key, schedule, ranks=range(2))
    expected = with_key(None, schedule)
    for found in values(crew.collect()):
        assert torch.equal(found.loss, expected.loss)


def test_ranks_make_what_a_function_with_a_state_reads(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    crew.start(with_state_held, schedule, ranks=range(2))
    params, step = with_state_held(None, schedule)
    outer, inner = values(crew.collect())
    # Both stages of rank 1 read the matrix in the middle, and nothing else.
    for (here, part), own in ((outer, params.keys() - {"middle"}), (inner, {"middle"})):
        assert {name for name, value in here.items() if not value.is_meta} == own
        for name in own:
            assert_identical(here[name], params[name])
            assert_identical(part.grads[name], step.grads[name])
        assert_identical(part.state, step.state)


def load_with_state(
    group: Group, schedule: Schedule, path: Path
) -> tuple[list[str], dict[str, Tensor], dict[str, Any], fpipe.StepState, dict[str, Any]]:
    """A module without data, whole from a checkpoint: what was read, a step, and saved again."""
    pipe = fpipe.from_module(
        normed.without_data(),
        schedule=schedule,
        cuts=normed.CUTS,
        loss=squares,
        has_state=True,
        compile=False,
        group=group,
    )
    batch = normed.normed_batch()
    read: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        state = pipe.load_state(path)
        note_reads(patch, read)
        params = pipe.load(path, state, batch)
    step = pipe.step(params, state, batch)
    own = {name: value for name, value in params.items() if not value.is_meta}
    later = path.with_name("later")
    if group is not None:
        dcp.save({**own, **buffers_of(step.state)}, checkpoint_id=later, process_group=group)
    return read, own, state, step, pipe.load_state(later)


@pytest.mark.parametrize("write", normed.WRITERS)
def test_ranks_read_their_parameters_and_the_whole_state(
    write: Any, crew: Crew, tmp_path: Path
) -> None:
    schedule, module = schedules.zbv(ranks=2, microbatches=4), normed.normed_module()
    path = write(module, tmp_path)
    parts = values(crew.run(load_with_state, schedule, path, ranks=range(2)))
    _, params, state, step, later = load_with_state(None, schedule, path)
    assert_identical(params, detached(module))
    assert_identical(state, state_of(module))
    for (read, own, held, part, again), mine in zip(parts, (("f", "l"), ("n", "s")), strict=True):
        assert sorted(read) == sorted(own) == sorted(n for n in params if n[0] in mine)
        assert_identical(own, {name: params[name] for name in own})
        assert_identical(held, state)
        assert_identical(part.loss, step.loss)
        assert_identical(part.state, step.state)
        assert_identical(again, step.state)
    assert_identical(later, step.state)


class Taught(torch.nn.Module):
    """Its teacher is read on the first rank alone, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.first, self.last = (torch.nn.Linear(4, 4) for _ in range(3))
        self.shift = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.teacher(x)
        out: Tensor = self.last(torch.tanh(self.first(x)) + aim) + self.shift.detach()
        return out


def train_taught(group: Group) -> list[tuple[dict[str, Tensor | None], Tensor]]:
    """Gradients and their norm, of a step and of one with a product."""
    with torch.device("meta"):
        module, batch = Taught().double(), {"x": torch.empty(8, 4).double()}
    pipe = fpipe.from_module(
        module,
        schedule=schedules.one_f_one_b(ranks=2, microbatches=4),
        cuts=["first"],
        loss=lambda output, _: output.square().mean(),
        compile=False,
        group=group,
    )
    params = pipe.init(normal, random.key(0), batch)
    batch = {"x": torch.ones(8, 4).double()}
    first = pipe.step(params, batch)
    # A gradient, which has None for what others have, is a vector; so is a product.
    second = fpipe.hvp(pipe).step(params, batch, first.grads)
    steps = first, second, fpipe.hvp(pipe).step(params, batch, second.hvp)
    return [
        (step.grads, fpipe.clip_by_global_norm(step.grads, 1.0, pipe=pipe)[1]) for step in steps
    ]


def test_what_another_rank_reads_has_no_gradient_here_whether_it_is_trained_or_not(
    crew: Crew,
) -> None:
    """A rank got one of its own, without data, which no norm could be taken of."""
    parts = values(crew.run(train_taught, ranks=range(2)))
    for (grads, norm), first, last in zip(train_taught(None), *parts, strict=True):
        assert torch.equal(first[1], norm) and torch.equal(last[1], norm)
        for name, grad in grads.items():
            assert grad is not None
            own, other = (last, first) if name[:5] in ("last.", "shift") else (first, last)
            assert torch.equal(own[0][name], grad) and other[0][name] is None
