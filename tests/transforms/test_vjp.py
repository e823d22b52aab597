"""Losses over the whole batch: outputs with an autograd history, and ``fpipe.vjp``."""

from __future__ import annotations

import logging
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from fpipe import Stage, pytree, schedules
from tests.distributed.crew import Crew, Outcome, attempt, values
from tests.models import assert_same, rand
from tests.state_model import make_batch, make_params, make_state, stateful_model
from tests.transforms.helpers import tracked

NO_OTHERS = {"positive": None, "w": None}
ZB = schedules.zb_h1(ranks=2, microbatches=3)


def encode(p: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return torch.tanh(batch["x"] @ p)


def project(p: Tensor, h: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    z = h @ p + batch["shift"]
    return {"z": z, "positive": (z > 0).sum(1), "w": z[:, :1] * (1 + 2j)}


STAGES: list[Any] = [encode, Stage(project, reads_batch=True)]


def whole(params: Any, batch: Any) -> dict[str, Tensor]:
    return project(params[1], encode(params[0], batch), batch)


def arguments(rows: int = 7) -> tuple[list[Tensor], dict[str, Tensor]]:
    return [rand(3, 4), rand(4, 2)], {"x": rand(rows, 3), "shift": rand(rows, 2)}


def contrast(z: Tensor) -> Tensor:
    """A loss that compares rows, so that no row has a loss of its own."""
    return torch.logsumexp(z @ z.T, 0).mean()


def of_all(out: dict[str, Tensor]) -> Tensor:
    return contrast(out["z"]) + out["w"].abs().max()


def grads(values: Any) -> list[Tensor | None]:
    return [leaf.grad for leaf in pytree.flatten(values)[0]]


def pipeline(schedule: fpipe.Schedule = ZB, **options: Any) -> fpipe.Pipeline:
    options = {"compile": False} | options
    return fpipe.pipeline(STAGES, lambda y, _: y["z"].mean(), schedule, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"remat": "full", "reduction": "sum"},
        {"schedule": schedules.gpipe(ranks=2, microbatches=2)},
        {"schedule": schedules.one_f_one_b(ranks=2, microbatches=7)},
        # One microbatch, for another number of rows would be compiled too.
        pytest.param(
            {"compile": True, "schedule": schedules.zb_h1(ranks=2, microbatches=1)},
            marks=pytest.mark.inductor,
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_loss_over_all_outputs_has_a_backward(options: dict[str, Any]) -> None:
    """Outputs once had no history, so a sum with tensors that have one had wrong gradients."""
    pipe = pipeline(**options)
    params, batch = arguments()
    for moves in (True,) if options.get("compile") else (False, True):
        own, theirs = tracked(params), tracked(params)
        x, y = (tracked(batch), tracked(batch)) if moves else (batch, batch)
        (of_all(pipe.forward(own, x)) + own[0].square().sum()).backward()
        (of_all(whole(theirs, y)) + theirs[0].square().sum()).backward()
        assert_same(grads((own, x)), grads((theirs, y)))


def test_vjp_equals_torch_func() -> None:
    params, batch = arguments()
    cotangent: Any = {"z": rand(7, 2), "positive": None, "w": torch.complex(rand(7, 1), rand(7, 1))}

    def function(p: Any, b: Any) -> tuple[Tensor, Tensor]:
        out = whole(p, b)
        return out["z"], out["w"]

    (z, w), pull = torch.func.vjp(function, params, batch)  # type: ignore[misc]
    expected = pull((cotangent["z"], cotangent["w"]))
    product = (cotangent["z"] * z).sum() + (cotangent["w"].conj() * w).real.sum()
    pipe = pipeline()
    assert_same(tuple(fpipe.vjp(pipe).step(params, batch, cotangent)), (product, expected[0]))
    by_both = fpipe.vjp(fpipe.grad(pipe, ("batch", "params")))
    other = by_both.with_schedule(schedules.gpipe(ranks=2, microbatches=7))
    for own in (by_both, other):
        found = own.step(params, batch=batch, cotangent=cotangent)
        assert_same(tuple(found), (product, expected[::-1]))


def test_forward_of_one_function_has_a_history_of_loss_and_aux() -> None:
    def loss_fn(p: Any, batch: Any, key: Tensor) -> Any:
        noise = fpipe.random.normal(key, batch["x"].shape, dtype=torch.float64)
        hidden = fpipe.cut(torch.tanh((batch["x"] + noise) @ p[0]))
        out = project(p[1], hidden, batch)
        return out["z"].square().mean(), {"out": out}

    pipe = fpipe.pipeline(loss_fn, schedule=ZB, has_aux=True, has_key=True, compile=False)
    params, batch = arguments()
    key = fpipe.random.key(3)

    def plain(p: Any) -> Tensor:
        outs, loss, rows = [], torch.zeros((), dtype=torch.float64), [3, 2, 2]
        parts = zip(*(leaf.split(rows) for leaf in batch.values()), strict=True)
        for number, part in enumerate(parts):
            own = dict(zip(batch, part, strict=True))
            value, aux = loss_fn(p, own, fpipe.random.fold_in(key, number))
            loss = loss + value * rows[number] / 7
            outs.append(aux["out"])
        return 2 * loss + of_all({name: torch.cat([o[name] for o in outs]) for name in ("z", "w")})

    own, theirs = tracked(params), tracked(params)
    loss, aux = pipe.forward(own, batch, key=key)
    (2 * loss + of_all(aux["out"])).backward()
    plain(theirs).backward()
    assert_same(grads(own), grads(theirs))
    own = tracked(params)
    pipe.forward(own, batch, key=key).loss.backward()
    assert_same(grads(own), pipe.step(params, batch, key=key).grads)
    given = {"out": {"z": rand(7, 2), "positive": None, "w": None}}
    product, found = fpipe.vjp(pipe).step(params, batch, given, key=key)
    aux = pipe.forward(params, batch, key=key).aux
    assert_same(product, (given["out"]["z"] * aux["out"]["z"]).sum())
    assert all(leaf.shape == p.shape for leaf, p in zip(found, params, strict=True))


def test_vjp_of_a_module_with_a_state() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    pipe = fpipe.from_module(
        module,
        schedule=schedules.one_f_one_b(ranks=2, microbatches=1),
        cuts=["0"],
        loss=lambda output, _: (output.mean(), output),
        has_aux=True,
        has_state=True,
        compile=False,
    )
    params = dict(module.named_parameters())
    state, batch = fpipe.nn.state_of(module), {"input": rand(6, 3)}
    contrast(pipe.forward(params, state, batch).aux).backward()
    found = grads(params)
    module.zero_grad()
    contrast(module(**batch)).backward()
    assert_same(found, grads(params))
    step = fpipe.vjp(pipe).step(params, state, batch, rand(6, 2))
    assert pytree.structure(step.state) == pytree.structure(state)


def test_backward_runs_under_the_autocast_of_the_call() -> None:
    """A backward is called outside of autocast, and once ran the stages outside of it too."""

    def half(p: Tensor, x: Tensor) -> Tensor:
        return x @ p

    pipe = fpipe.pipeline([half, half], lambda y, _: y.mean(), ZB, compile=False)
    params, x = [torch.randn(8, 8), torch.randn(8, 8)], torch.randn(6, 8)
    own, theirs = tracked(params), tracked(params)
    with torch.autocast("cpu", torch.bfloat16):
        mine, plain = pipe.forward(own, x), (x @ theirs[0]) @ theirs[1]
    assert mine.dtype == plain.dtype == torch.bfloat16
    mine.float().square().sum().backward()
    plain.float().square().sum().backward()
    for a, b in zip(grads(own), grads(theirs), strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        exact = fpipe.vjp(pipe).step(params, x, 2 * mine.detach().float().bfloat16())
    assert_same(grads(own), exact.grads)


def test_backward_is_traced_once(caplog: pytest.LogCaptureFixture) -> None:
    pipe, (params, batch) = pipeline(), arguments()
    with caplog.at_level(logging.INFO, "fpipe"):
        for _ in range(3):
            of_all(pipe.forward(tracked(params), batch)).backward()
    assert len([r for r in caplog.records if r.message.startswith("tracing")]) == 2


def test_derived_pipeline_is_kept_by_its_out_dims() -> None:
    """It was once kept by the printed out_dims, which some classes print anew each time."""

    class Pair:
        def __init__(self, first: Any, second: Any) -> None:
            self.both = first, second

    register: Any = optree.register_pytree_node
    register(Pair, lambda pair: (pair.both, None), lambda _, both: Pair(*both), namespace="fpipe")
    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(
        [lambda w, x: Pair(x * w, (x * w).T)],
        lambda y, _: y.both[0].mean(),
        schedule,
        compile=False,
    )
    w, x = torch.ones(3, requires_grad=True), rand(4, 3).float()
    for _ in range(3):
        first, second = pipe.forward([w], x, out_dims=Pair(0, 1)).both
        assert second.shape == (3, 4)
        (first.sum() + second.sum()).backward()
    assert len(pipe._engine.derived) == 1


def test_forward_without_autograd_has_no_history() -> None:
    pipe, (params, batch) = pipeline(), arguments()
    with torch.no_grad():
        assert not pipe.forward(tracked(params), batch)["z"].requires_grad
    assert not pipe.forward(params, batch)["z"].requires_grad
    out = pipe.forward(tracked(params), batch)
    assert out["z"].requires_grad and not out["positive"].requires_grad


# ── wherever it is called ───────────────────────────────────────────────────────────────────────


def compiled(call: Any) -> Any:
    return torch.compile(call, backend="eager")()


def dual(call: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return call()


def unmapped(call: Any) -> Any:
    return torch.func.vmap(lambda c: c * call())(torch.ones(1, dtype=torch.float64))


def hooked(call: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return call()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("around", [compiled, dual, unmapped, hooked])
def test_forward_has_a_history_within_other_transforms(around: Any) -> None:
    """Outputs were once detached within torch.compile, forward mode and a vmap of other tensors."""
    pipe, (params, batch) = pipeline(), arguments()
    own, theirs = tracked(params), tracked(params)
    around(lambda: contrast(pipe.forward(own, batch)["z"])).sum().backward()
    contrast(whole(theirs, batch)["z"]).backward()
    assert_same(grads(own), grads(theirs))


def test_backward_within_saved_tensor_hooks() -> None:
    pipe, (params, batch) = pipeline(), arguments()
    own, theirs = tracked(params), tracked(params)
    with torch.autograd.graph.save_on_cpu():
        contrast(pipe.forward(own, batch)["z"]).backward()
    contrast(whole(theirs, batch)["z"]).backward()
    assert_same(grads(own), grads(theirs))


def test_backward_of_a_mapped_forward_is_refused() -> None:
    pipe, (params, batch) = pipeline(), arguments()
    own = tracked(params)
    several = torch.stack([batch["x"], batch["x"]])
    found = torch.func.vmap(lambda x: pipe.forward(own, batch | {"x": x})["z"])(several)
    with pytest.raises(fpipe.FpipeError, match="an ensemble"):
        found.sum().backward()


def test_backward_refuses_outputs_that_have_changed() -> None:
    """The second run reads the factor anew, and once returned gradients of other outputs."""
    factor, key = torch.ones((), dtype=torch.float64), fpipe.random.key(0)

    def scaled(p: Tensor, x: Tensor, key: Tensor) -> Tensor:
        return x * p * factor + fpipe.random.normal(key, x.shape, dtype=x.dtype)

    stages = [Stage(scaled, reads_key=True)] * 2
    pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), ZB, compile=False)
    out = pipe.forward(tracked([rand(3), rand(3)]), rand(6, 3), key=key)
    factor.fill_(2)
    with pytest.raises(fpipe.FpipeError, match="put out other numbers when it ran again"):
        out.square().sum().backward()
    out = pipe.forward(tracked([rand(3), rand(3)]), rand(6, 3), key=key)
    key.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.square().sum().backward()
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double().eval()
    modular = fpipe.from_module(
        module,
        schedule=ZB,
        cuts=["0"],
        loss=lambda y, _: (y.mean(), y),
        has_aux=True,
        compile=False,
    )
    aux = modular.forward(dict(module.named_parameters()), {"input": rand(6, 3)}).aux
    module.train()
    with pytest.raises(fpipe.FpipeError, match="put out other numbers when it ran again"):
        aux.square().sum().backward()


@pytest.mark.parametrize("method", ["forward", "value", "step"])
def test_forward_under_autograd_names_what_is_no_tensor(method: str) -> None:
    params, batch = arguments()
    with pytest.raises(fpipe.BatchError, match=r"batch\['n'\]=3 is an int"):
        getattr(pipeline(), method)(tracked(params), batch | {"n": 3})


# ── what cannot be ──────────────────────────────────────────────────────────────────────────────


def test_second_derivative_of_a_forward_is_refused() -> None:
    pipe, (params, batch) = pipeline(), arguments()
    own = tracked(params)
    found = torch.autograd.grad(of_all(pipe.forward(own, batch)), own, create_graph=True)
    with pytest.raises(fpipe.FpipeError, match="was differentiated twice: it can be once"):
        found[0].sum().backward(retain_graph=True)
    # By some leaves alone, too: it was the derivative of the rest, without a word.
    with pytest.raises(fpipe.FpipeError, match="was differentiated twice"):
        loss = of_all(pipe.forward(own, batch))
        (first,) = torch.autograd.grad(loss, own[:1], create_graph=True)
        torch.autograd.grad(loss + first.square().sum(), own[1:])
    cotangent = torch.ones_like(params[0]).requires_grad_()
    with pytest.raises(fpipe.FpipeError, match="was differentiated twice"):
        torch.autograd.grad(found[0], own[0], cotangent)
    with pytest.raises(fpipe.FpipeError, match=r"torch\.func\.grad .* fpipe\.vjp\(pipe\) gives"):
        torch.func.grad(lambda p: of_all(pipe.forward(p, batch)))(params)


def test_several_cotangents_at_once_are_refused() -> None:
    """torch once raised an error about an operation that the caller had not called."""
    pipe, (params, batch) = pipeline(), arguments()
    own = tracked(params)
    z = pipe.forward(own, batch)["z"]
    with pytest.raises(fpipe.FpipeError, match=r"several cotangents at once .* one after"):
        torch.autograd.grad(z, own, torch.stack([z, z]).detach(), is_grads_batched=True)


def test_backward_of_draws_without_a_key_is_refused() -> None:
    def noisy(p: Tensor, x: Tensor) -> Tensor:
        return F.dropout(x * p, 0.5)

    pipe = fpipe.pipeline([noisy, noisy], lambda y, _: y.mean(), ZB, compile=False)
    with pytest.raises(fpipe.FpipeError, match="would draw other numbers"):
        pipe.forward(tracked([rand(3), rand(3)]), rand(6, 3)).sum().backward()


def check_refused() -> dict[str, tuple[Any, str]]:
    pipe = pipeline()

    def scalar(p: Any, batch: Any) -> Tensor:
        return fpipe.cut(batch["x"] @ p[0]).mean()

    return {
        "hvp": (fpipe.hvp(pipe), "takes a vector already"),
        "twice": (fpipe.vjp(pipe), "takes a vector already"),
        "ensemble": (fpipe.vmap(pipe), "an ensemble, or one that goes by rows"),
        "rows": (fpipe.per_example_grads(pipe), "an ensemble, or one that goes by rows"),
        "function": (fpipe.pipeline(scalar, schedule=ZB), r"let it return \(loss, aux\)"),
    }


@pytest.mark.parametrize("name", ["hvp", "twice", "ensemble", "rows", "function"])
def test_pipelines_without_a_vjp_are_refused(name: str) -> None:
    pipe, text = check_refused()[name]
    with pytest.raises(fpipe.StageError, match=text):
        fpipe.vjp(pipe)


def test_backward_of_outputs_without_a_derivative_is_refused() -> None:
    """Outputs without a derivative were once detached."""
    params, batch = arguments()
    last = pipeline(out_dims={"z": 0, "positive": 0, "w": None})
    with pytest.raises(fpipe.BatchError, match=r"\['w'\] is of an output of which the last"):
        last.forward(tracked(params), batch)["w"].real.sum().backward()
    own = tracked(params)
    last.forward(own, batch)["z"].sum().backward()
    assert_same(grads(own), torch.func.grad(lambda p: whole(p, batch)["z"].sum())(params))
    several = [torch.stack([leaf, leaf]) for leaf in params]
    with pytest.raises(fpipe.FpipeError, match=r"no derivative here: .*an ensemble"):
        fpipe.vmap(pipeline()).forward(tracked(several), batch)["z"].sum().backward()
    for transform in (fpipe.jvp, fpipe.hvp):
        z = transform(pipeline()).forward(tracked(params), batch, params)[0]["z"]
        with pytest.raises(fpipe.FpipeError, match=r"forward of fpipe\.jvp\(pipe\)"):
            z.sum().backward()
    product = fpipe.vjp(last).value(tracked(params), batch, {"z": rand(7, 2)} | NO_OTHERS)
    with pytest.raises(fpipe.FpipeError, match="or takes a cotangent"):
        product.backward()


def test_backward_of_a_loss_with_a_state_is_refused() -> None:
    pipe = fpipe.pipeline(
        stateful_model,
        schedule=schedules.one_f_one_b(ranks=4, microbatches=2),
        has_state=True,
        has_aux=True,
        compile=False,
    )
    params = pytree.tree_map(
        lambda p: p.clone().requires_grad_() if p.is_floating_point() else p, make_params()
    )
    loss = pipe.value(params, make_state(), make_batch())
    with pytest.raises(fpipe.FpipeError, match=r"a pipeline with a state.*pipe\.step returns"):
        loss.backward()


@pytest.mark.parametrize(
    ("cotangent", "text"),
    [
        ({"z": rand(4, 2), "positive": None, "w": None}, "must have 7 rows along dimension 0"),
        ({"z": rand(7, 2).float(), "positive": None, "w": None}, "is torch.float32 of shape"),
        ({"z": rand(7, 2)}, "cotangent must be a pytree prefix of the output"),
        ({"z": None, "positive": None, "w": None}, "give one tensor at least"),
        ({"z": None, "positive": rand(7), "w": None}, "no floating-point or complex number"),
        (None, "a rank passes both of them, or neither"),
    ],
)
def test_cotangents_that_do_not_fit_are_refused(cotangent: Any, text: str) -> None:
    params, batch = arguments()
    with pytest.raises(fpipe.FpipeError, match=text):
        fpipe.vjp(pipeline()).step(params, batch, cotangent)


def test_ensembles_and_rows_of_a_vjp_are_refused() -> None:
    pipe = fpipe.vjp(pipeline())
    for transform in (fpipe.vmap, fpipe.per_example_grads):
        with pytest.raises(fpipe.StageError, match=r"of fpipe\.vjp\(pipe\) is not defined"):
            transform(pipe)


# ── over processes ──────────────────────────────────────────────────────────────────────────────


def vjp_over_ranks(group: dist.ProcessGroup, cotangent: Any) -> tuple[Any, Outcome | None]:
    params, batch = arguments()
    pipe = pipeline(group=group)
    if group.rank() == 0:
        cotangent = pytree.tree_map(torch.zeros_like, cotangent)  # not read
    step = fpipe.vjp(pipe).step(pipe.local(params), batch, cotangent)
    out = pipe.forward(tracked(pipe.local(params)), batch)
    return step, None if out is None else attempt(out["z"].sum().backward)


def test_over_processes_every_rank_takes_the_cotangent(pair: Crew) -> None:
    params, batch = arguments()
    cotangent = {"z": rand(7, 2), "positive": None, "w": None}
    expected = fpipe.vjp(pipeline()).step(params, batch, cotangent)
    for rank, (step, refusal) in enumerate(values(pair.run(vjp_over_ranks, cotangent))):
        assert_same(step.loss, expected.loss)
        assert_same(step.grads[rank], expected.grads[rank])
        if rank:
            assert "lies on one rank: fpipe.vjp(pipe).step" in refusal.error.text
