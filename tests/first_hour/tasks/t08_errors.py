"""Mistakes on purpose: each error names the argument, its value, the rule and what to do."""

import torch

import fpipe


def encode(params, batch):
    return torch.tanh(batch["x"] @ params["w"])


def decode(params, hidden):
    return hidden @ params["w"]


def branches(params, hidden):
    if hidden.sum() > 0:
        return hidden @ params["w"]
    return hidden


def loss(y, batch):
    return (y - batch["y"]).square().mean()


schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=8)
params = [{"w": torch.randn(1, 32)}, {"w": torch.randn(32, 1)}]
batch = {"x": torch.randn(64, 1), "y": torch.randn(64, 1)}


def run(stages=(encode, decode), params=params, batch=batch, schedule=schedule):
    pipe = fpipe.pipeline(list(stages), loss, schedule, compile=False)
    return pipe.step(params, batch)


MISTAKES = {
    "a stage too few": lambda: run(stages=[encode]),
    "a key of the batch is missing": lambda: run(batch={"x": batch["x"]}),
    "fewer rows than microbatches": lambda: run(batch={k: v[:3] for k, v in batch.items()}),
    "shapes that do not fit": lambda: run(params=[params[0], {"w": torch.randn(31, 1)}]),
    "a branch on data": lambda: run(stages=[encode, branches]),
    "a schedule that cannot run": lambda: fpipe.verify(
        fpipe.Schedule.from_text("0F0 0B0\n1B0 1F0")
    ),
    "an unknown schedule": lambda: fpipe.schedules.get("zb_h9", ranks=2, microbatches=8),
}
for name, mistake in MISTAKES.items():
    try:
        mistake()
    except fpipe.FpipeError as error:
        message = str(error)
        assert len(message) > 40, message
        print(f"{name}\n    {type(error).__name__}: {message}")
    else:
        raise AssertionError(f"{name} raised nothing")
