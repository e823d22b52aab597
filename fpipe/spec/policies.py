"""Policies of FSDP2 for a pipeline: `MixedPrecisionPolicy` and `CPUOffloadPolicy`.

    parameters ─ param_dtype ─► stage ─ param_dtype ─► … last stage ─ output_dtype ─► loss
    gradients  ─ summed in reduce_dtype ─► in the parameters' dtype

Parameters are cast once a step: what depends on them alone is computed once. The rules are those of
FSDP2 (``torch.distributed.fsdp.fully_shard``), with a stage for its module.

With offload, parameters and gradients live on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.errors import StageError, a_type, label_of
from fpipe.inputs.host_memory import on_the_cpu
from fpipe.spec.user_functions import Stage


@dataclass(frozen=True)
class Precision:
    """The dtypes of a pipeline.

    Attributes:
        param_dtype: in which stages compute, and in which their values travel; None for that of
            what they are given.
        reduce_dtype: in which gradients are added up, over microbatches and over replicas; None for
            `param_dtype`.
        output_dtype: of what the last stage returns to the loss; None for what it is.
        casts_inputs: stages get their floating-point inputs in `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    casts_inputs: bool = True

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are added up; None for that of the parameters."""
        return self.param_dtype if self.reduce_dtype is None else self.reduce_dtype

    def params(self, tree: Any) -> Any:
        """Parameters as a stage computes with them."""
        return cast(tree, self.param_dtype)

    def inputs(self, tree: Any) -> Any:
        """The input of a stage, from the batch or from the stage before."""
        return cast(tree, self.param_dtype) if self.casts_inputs else tree

    def output(self, tree: Any) -> Any:
        """The output of the last stage."""
        return cast(tree, self.output_dtype)


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """A tree with its floating-point tensors in a dtype; as it is where that is None."""
    if dtype is None:
        return tree

    def moved(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return pytree.tree_map(moved, tree)


@dataclass(frozen=True)
class CastStage:
    """A stage function with its values cast.

    Attributes:
        fn: the stage function.
        precision: the dtypes.
        is_last: its output goes to the loss.
    """

    fn: Callable[..., Any]
    precision: Precision
    is_last: bool

    def __post_init__(self) -> None:
        # The name stands in messages, and for the function in what ranks compare.
        object.__setattr__(self, "__qualname__", label_of(self.fn))

    def __call__(self, params: Any, *inputs: Any, **options: Any) -> Any:
        precision = self.precision
        output = self.fn(precision.params(params), *map(precision.inputs, inputs), **options)
        return precision.output(output) if self.is_last else precision.inputs(output)


@dataclass(frozen=True)
class CastFunction:
    """One function of the whole model, with its arguments cast; a state stays as it is.

    Attributes:
        fn: ``(params, batch) -> loss``, or ``(params, state, batch) -> loss, state``.
        precision: the dtypes.
    """

    fn: Callable[..., Any]
    precision: Precision

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", label_of(self.fn))

    def __call__(self, params: Any, *arguments: Any, **options: Any) -> Any:
        *state, batch = arguments
        precision = self.precision
        return self.fn(precision.params(params), *state, precision.inputs(batch), **options)


def cast_stages(stages: tuple[Stage, ...], precision: Precision | None) -> tuple[Stage, ...]:
    """Stages whose functions are cast."""
    if precision is None:
        return stages
    last = len(stages) - 1
    return tuple(
        replace(stage, fn=CastStage(stage.fn, precision, number == last))
        for number, stage in enumerate(stages)
    )


def cast_function(fn: Callable[..., Any], precision: Precision | None) -> Callable[..., Any]:
    """One function of the whole model, cast.

    Raises:
        StageError: the policy has an `output_dtype`.
    """
    if precision is None:
        return fn
    if precision.output_dtype is not None:
        raise StageError(
            f"mp_policy has output_dtype={precision.output_dtype}, and one function of the whole "
            "model has no output before its loss: cast what the loss is made of in the function"
        )
    return CastFunction(fn, precision)


def read_policy(policy: Any, accum_dtype: torch.dtype | None) -> Precision | None:
    """The dtypes that a user's ``mp_policy`` names.

    Args:
        policy: a ``torch.distributed.fsdp.MixedPrecisionPolicy``, or None.
        accum_dtype: the other argument that names the dtype of sums.

    Raises:
        StageError: it is no policy, a dtype is none of floating point, or both arguments are given.
    """
    if policy is None:
        return None
    module = sys.modules.get("torch.distributed.fsdp")  # whoever has a policy has imported it
    if module is None or not isinstance(policy, module.MixedPrecisionPolicy):
        raise StageError(
            f"mp_policy={policy!r:.60} is {a_type(policy)}: it must be a MixedPrecisionPolicy of "
            "torch.distributed.fsdp, or None"
        )
    if accum_dtype is not None:
        raise StageError(
            f"accum_dtype={accum_dtype} is given beside mp_policy, whose reduce_dtype is the dtype "
            "in which gradients are added up: give one of them"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not dtype.is_floating_point:
            raise StageError(
                f"mp_policy has {name}={dtype}: it must be a floating-point dtype such as "
                "torch.bfloat16, or None"
            )
    return Precision(
        policy.param_dtype,
        policy.reduce_dtype,
        policy.output_dtype,
        bool(policy.cast_forward_inputs),
    )


@dataclass(frozen=True)
class Offload:
    """Where parameters and gradients live while nothing computes with them.

    Attributes:
        pins: in page-locked memory.
        devices: of the ranks, on which stages compute.
    """

    pins: bool
    devices: tuple[torch.device, ...]

    @property
    def copies(self) -> bool:
        """Whether any rank computes elsewhere than on the CPU."""
        return any(device.type != "cpu" for device in self.devices)

    def home(self, value: Tensor) -> Tensor:
        """A tensor where it is to live; itself where it lies there."""
        return on_the_cpu(value, pin=self.pins and self.copies)


def read_offload(policy: Any, devices: tuple[torch.device, ...] | None) -> Offload | None:
    """A user's ``offload_policy``.

    Args:
        policy: a ``torch.distributed.fsdp.CPUOffloadPolicy``, an ``OffloadPolicy``, or None.
        devices: of the ranks; None where none are named.

    Raises:
        StageError: it is no policy, or no device is known.
    """
    if policy is None:
        return None
    module = sys.modules.get("torch.distributed.fsdp")  # whoever has a policy has imported it
    if module is None or not isinstance(policy, module.OffloadPolicy):
        raise StageError(
            f"offload_policy={policy!r:.60} is {a_type(policy)}: it must be a CPUOffloadPolicy of "
            "torch.distributed.fsdp, or None"
        )
    if not isinstance(policy, module.CPUOffloadPolicy):
        return None
    if devices is None:
        raise StageError(
            "offload_policy keeps parameters on the CPU, and nothing says where stages compute: "
            'in one process pass devices=, such as ["cuda:0"] * ranks'
        )
    return Offload(bool(policy.pin_memory), devices)
