"""One function, cut into four stages: a table at both ends, and a value that skips two stages.

    python examples/tied_and_skip.py             # compiles first; under two minutes
    python examples/tied_and_skip.py --smoke     # a few steps, uncompiled

The model copies a sequence backwards. Nothing is declared: the gradient of the shared table is the
sum over both stages that read it, and the embedding goes straight from the first stage to the last.
"""

import sys

import torch
import torch.nn.functional as F

import fpipe

SMOKE = "--smoke" in sys.argv
VOCABULARY, WIDTH, LENGTH = 16, 32, 8


def block(params, x):
    """Mixes places first, and then channels."""
    x = x + torch.tanh(torch.einsum("lm,bmw->blw", params["places"], x))
    return x + torch.tanh(x @ params["channels"])


def loss_fn(params, tokens):
    embedded = F.embedding(tokens, params["table"])
    x = fpipe.cut(embedded)
    for own in params["blocks"]:
        x = fpipe.cut(block(own, x))
    # The table again, and the embedding again: two stages later.
    logits = (x + embedded @ params["skip"]) @ params["table"].T
    return F.cross_entropy(logits.flatten(0, 1), tokens.flip(1).flatten())


torch.manual_seed(0)
torch.set_num_threads(1)
params = {
    "table": torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5,
    "skip": torch.randn(WIDTH, WIDTH) / WIDTH**0.5,
    "blocks": [
        {
            "places": torch.randn(LENGTH, LENGTH) / LENGTH**0.5,
            "channels": torch.randn(WIDTH, WIDTH) / WIDTH**0.5,
        }
        for _ in range(2)
    ],
}
schedule = fpipe.schedules.zb_h1(ranks=4, microbatches=8)
pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=not SMOKE)

# The same gradients as without a pipeline, whoever reads what.
tokens = torch.randint(VOCABULARY, (64, LENGTH))
loss, grads = pipe.step(params, tokens)
expected, expected_loss = torch.func.grad_and_value(loss_fn)(params, tokens)
difference = (grads["table"] - expected["table"]).abs().max()
print(f"loss {loss:.4f}, unpipelined {expected_loss:.4f}")
print(f"the gradient of the table is {difference:.0e} off")
assert difference < 1e-5


def flat(tree):
    return [tree["table"], tree["skip"], *(leaf for own in tree["blocks"] for leaf in own.values())]


leaves = flat(params)
optimizer = torch.optim.Adam(leaves, lr=1e-2)
for step in range(21 if SMOKE else 201):
    loss, grads = pipe.step(params, torch.randint(VOCABULARY, (64, LENGTH)))
    for leaf, grad in zip(leaves, flat(grads), strict=True):
        leaf.grad = grad
    optimizer.step()
    if step % (10 if SMOKE else 50) == 0:
        print(f"step {step:3}   loss {loss:.4f}")
