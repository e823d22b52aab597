"""Random numbers as pure functions of a key: the same key gives the same numbers, anywhere.

A key is a tensor of two 32-bit words. A number depends only on the key and on its place in the
result. No state advances, so a number does not change when it is computed twice, elsewhere or in
another order. Use a key once; make new keys with `split` and `fold_in`.

The generator is Threefry2x32 (Salmon et al., 2011, `fpipe.random.threefry`); the place is its
counter. `key`, `split`, `fold_in` and `bits` agree with ``jax.random``
(``jax_threefry_partitionable``, its default). Everything is integer arithmetic in plain tensor
operations, and `normal` adds sums and products of doubles (`fpipe.random.normal_quantile`): the
same bits on every device, compiled or not, and under `torch.func.vmap`, `vjp` and `jvp`.
`categorical` takes logarithms and says where it may differ. Words are held in int64, because torch
has no addition and no shift of uint32.

Users import the functions below from here. Other rooms import the submodules: `key_tensors` (keys
and their checks), `distributions`, `torch_draws` and `keyed_mode` (torch's own random operations,
drawn from keys).
"""

from fpipe.random.distributions import (
    bernoulli,
    bits,
    categorical,
    dropout,
    normal,
    permutation,
    randint,
    uniform,
)
from fpipe.random.key_tensors import fold_in, key, split

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "dropout",
    "fold_in",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "uniform",
]


def __dir__() -> list[str]:
    return __all__
