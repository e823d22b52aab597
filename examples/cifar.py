"""The classic two-part network for CIFAR-10: a convolutional and a dense part, 32 microbatches.

    python examples/cifar.py             # compiles first; under two minutes
    python examples/cifar.py --smoke     # a few steps, uncompiled

The images ship with scikit-learn (pip install scikit-learn): its handwritten digits, in the size
and the three channels of CIFAR-10. Accuracy comes back as aux, from the last stage.
"""

import sys
from math import prod

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fpipe

SMOKE = "--smoke" in sys.argv
ROWS, MICROBATCHES = 256, 32


def convolutional(params, images):
    x = F.max_pool2d(F.relu(F.conv2d(images, *params["first"])), 2)
    return F.max_pool2d(F.relu(F.conv2d(x, *params["second"])), 2)


def dense(params, x):
    x = x.flatten(1)
    x = F.relu(F.linear(x, *params["third"]))
    x = F.relu(F.linear(x, *params["fourth"]))
    return F.linear(x, *params["fifth"])


def loss_fn(params, batch):
    x = fpipe.cut(convolutional(params, batch["images"]))
    scores = dense(params, x)
    right = scores.argmax(-1) == batch["labels"]
    return F.cross_entropy(scores, batch["labels"]), {"right": right}


def weights(outputs, *inputs):
    scale = prod(inputs) ** -0.5
    return [(torch.rand(outputs, *inputs) * 2 - 1) * scale, torch.zeros(outputs)]


torch.manual_seed(0)
torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
images = F.interpolate(images, (32, 32), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train, test = order[: 6 * ROWS], order[6 * ROWS :]

params = {
    "first": weights(6, 3, 5, 5),
    "second": weights(16, 6, 5, 5),
    "third": weights(120, 400),
    "fourth": weights(84, 120),
    "fifth": weights(10, 84),
}
schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=MICROBATCHES)
pipe = fpipe.pipeline(loss_fn, schedule=schedule, has_aux=True, compile=not SMOKE)
optimizer = torch.optim.Adam([leaf for pair in params.values() for leaf in pair], lr=2e-3)

for epoch in range(1 if SMOKE else 6):
    for rows in train[torch.randperm(len(train))].split(ROWS)[: 2 if SMOKE else None]:
        batch = {"images": images[rows], "labels": labels[rows]}
        loss, grads, aux = pipe.step(params, batch)
        for name, pair in params.items():
            for leaf, grad in zip(pair, grads[name], strict=True):
                leaf.grad = grad
        optimizer.step()
    print(f"epoch {epoch:2}   loss {loss:.3f}   right {aux['right'].float().mean():.0%}")

held = {"images": images[test], "labels": labels[test]}
loss, aux = pipe.forward(params, held)
print(f"{len(test)} held-out images: loss {loss:.3f}, right {aux['right'].float().mean():.0%}")
