"""What the kernel for sums of weight gradients computes, by Triton's interpreter, as JSON.

Run as ``TRITON_INTERPRET=1 python -m tests.stage.interpreted_wgrad``: Triton decides when it
is imported whether it interprets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

import fpipe
from fpipe import schedules
from fpipe.pieces import inductor, wgrad_kernel, wgrad_sums
from fpipe.pieces.wgrad_kernel import CONFIGS, Config, add_product
from fpipe.pieces.wgrad_sums import Operand, Problem

SIZES: Final = [(1, 1, 1), (7, 5, 3), (33, 33, 40), (1, 40, 70), (64, 32, 32), (70, 1, 17)]
DTYPES: Final = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "offset": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 0))[1:, 3:-2],
}
SMALL: Final = Config(32, 32, 16, 4, 2)


def errors() -> dict[str, Any]:
    """The greatest error of each case, beside the greatest sum of what is added, without signs."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for number, dtype in enumerate(DTYPES):
        for rows, depth, columns in SIZES[number :: len(DTYPES)]:  # two of them each
            for name, lay in LAYOUTS.items():
                a, b = torch.randn(rows, depth).to(dtype), torch.randn(depth, columns).to(dtype)
                so_far = torch.randn(rows, columns)
                expected = so_far.double() + a.double() @ b.double()
                scale = (so_far.abs() + a.abs().float() @ b.abs().float()).max()
                other = LAYOUTS["columns" if name == "rows" else "rows"]
                for left, right, sum_ in ((lay, other, lay), (other, lay, other)):
                    result = add_product(sum_(so_far), left(a), right(b), SMALL)
                    error = (result - expected).abs().max() / scale
                    case = f"{dtype} {rows}x{depth}x{columns} {name}"
                    found[case] = max(found.get(case, 0.0), error.item())
    for number, config in enumerate(CONFIGS):
        a, b, so_far = torch.randn(140, 70), torch.randn(70, 260), torch.randn(140, 260)
        result = add_product(so_far, a.half(), b.half(), config)
        error = (result - so_far - a.half().float() @ b.half().float()).abs().max()
        found[f"configuration {number}"] = error.item() / 40
    so_far = torch.randn(3, 4)
    nothing = add_product(so_far, torch.ones(3, 0).half(), torch.ones(0, 4).half(), SMALL)
    none = add_product(so_far[:0], torch.ones(0, 5).half(), torch.ones(5, 4).half(), SMALL)
    return found | {"nothing": torch.equal(nothing, so_far), "none": list(none.shape)}


def choices() -> dict[str, Any]:
    """The way that is chosen where times, errors and failures are as they are told."""
    small = torch.bfloat16
    problem = Problem(
        Operand((5, 4), (4, 1), torch.float32),
        Operand((5, 3), (1, 5), small),
        Operand((3, 4), (4, 1), small),
        torch.device("cpu"),
        inductor.OPTIONS,
    )
    plain, measured = wgrad_kernel.add_product, wgrad_sums._measured.__wrapped__
    state = torch.get_rng_state()

    def chosen(deed: Callable[..., Tensor], times: dict[int | None, float]) -> int | None:
        wgrad_kernel.add_product = deed
        wgrad_sums.milliseconds = lambda ways, device: {way: times[way] for way in ways}
        choice: int | None = measured(problem)
        return choice

    def fails(so_far: Tensor, a: Tensor, b: Tensor, config: Config) -> Tensor:
        if config == CONFIGS[1]:
            raise RuntimeError("out of resource: shared memory")
        return plain(so_far, a, b, config)

    def errs(so_far: Tensor, a: Tensor, b: Tensor, config: Config) -> Tensor:
        return plain(so_far, a, b, config) + (config == CONFIGS[1])

    quick: dict[int | None, float] = {None: 1.0, 0: 0.9, 1: 0.5, 2: 0.8, 3: 2.0}
    found = {
        "faster": chosen(plain, quick),
        "slower": chosen(plain, dict.fromkeys(quick, 1.0)),
        "fails": chosen(fails, quick),
        "errs": chosen(errs, quick),
    }
    return found | {"drew": not torch.equal(state, torch.get_rng_state())}


def steps() -> dict[str, Any]:
    """Steps of a compiled pipeline, with the kernel and with the option that turns it off."""
    torch.manual_seed(0)
    taken: list[Problem] = []

    def take(problem: Problem) -> int:
        taken.append(problem)
        return 3

    inductor.choose_measured = take
    w, x = torch.randn(24, 40).bfloat16(), torch.randn(9, 5, 24).bfloat16()
    found: dict[str, Any] = {}
    grads = {}
    for name, option in (("kernel", {}), ("off", {wgrad_sums.OPTION: False})):
        pipe = fpipe.pipeline(
            [lambda w, x: torch.tanh(x @ w)],
            lambda y, _: y.float().square().mean(),
            schedules.gpipe(ranks=1, microbatches=3),
            compile={"options": option} if option else True,
            accum_dtype=torch.float32,
        )
        taken.clear()
        (grads[name],) = pipe.step([w], x).grads
        found[name] = len(taken)
    exact = w.double().requires_grad_()
    torch.tanh(x.double() @ exact).square().mean().backward()
    assert exact.grad is not None
    scale = exact.grad.abs().max()
    errors = {name: (grad - exact.grad).abs().max() / scale for name, grad in grads.items()}
    return found | {f"error, {name}": error.item() for name, error in errors.items()}


if __name__ == "__main__":
    print(json.dumps({part.__name__: part() for part in (errors, steps, choices)}))
