"""jvp, hvp, ggnvp: derivatives in a direction, by pipelines of dual stages."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fpipe import pytree
from fpipe.autograd.history import OF_DUALS, is_tracked, without_history
from fpipe.engine import OWN
from fpipe.errors import BatchError
from fpipe.functional.dual import derivative
from fpipe.functional.stagewise import refuse_argnums
from fpipe.inputs.ambient import is_within
from fpipe.inputs.signature import Goal
from fpipe.pipelines import Pipeline
from fpipe.program.program import Program
from fpipe.spec.convention import Dual
from fpipe.transforms.wrapped_pipelines import Wrapping, definition_of


class Jvp(NamedTuple):
    """A loss and its derivative in a direction.

    Attributes:
        loss: as `Pipeline.value` returns it.
        jvp: the derivative, of the same shape and dtype.
    """

    loss: Tensor
    jvp: Tensor


class Hvp(NamedTuple):
    """A loss, its gradient, and the product of its second derivative with a vector.

    Attributes:
        loss: as `Pipeline.step` returns it.
        grads: as `Pipeline.step` returns them.
        hvp: the product, in the structure, shapes and dtypes of the gradients.
    """

    loss: Tensor
    grads: Any
    hvp: Any


class HvpAux(NamedTuple):
    """An `Hvp` with aux, where ``has_aux=True`` was declared.

    Attributes:
        loss: as in `Hvp`.
        grads: as in `Hvp`.
        hvp: as in `Hvp`.
        aux: as `Pipeline.step` returns it.
    """

    loss: Tensor
    grads: Any
    hvp: Any
    aux: Any


class Directional(Wrapping):
    """A pipeline whose methods take a vector after the batch; `fpipe.hvp` makes one.

    A vector has the structure, shapes and dtypes of the parameters, or of the gradients, which have
    None for leaves without a derivative. Its leaves for parameters that are not trained are not
    read: their direction is 0. If the pipeline has other ``argnums``, a vector has their structure:
    a direction of the batch, or a tuple of both, with None in place of one that does not move.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
        >>> pipe = fpipe.pipeline([torch.mul], lambda y, _: y.mean(), schedule, compile=False)
        >>> loss, derivative = fpipe.jvp(pipe).value(
        ...     [torch.tensor(3.0)], torch.ones(2), [torch.tensor(10.0)]
        ... )
        >>> loss.item(), derivative.item()
        (3.0, 10.0)
    """

    def step(self, params: Any, batch: Any, vector: Any, key: Tensor | None = None) -> Any:
        """Loss, gradients and the product with the vector, from one forward and one backward.

        Args:
            params: as in `Pipeline.step`.
            batch: as in `Pipeline.step`.
            vector: the vector of the product.
            key: as in `Pipeline.step`.

        Returns:
            An `Hvp`; with ``has_aux`` an `HvpAux`. Both gradients and products are by ``argnums``;
            an argument that does not move has None for a gradient, but a product.

        Raises:
            BatchError: as in `Pipeline.step`, or `vector` does not fit what it is a direction of.
            StageError: a stage cannot be traced; an operation has no right rule in forward mode.
            PipelineError: an action failed.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
            >>> stage, loss = (lambda w, x: w * x), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
            >>> loss, grads, product = fpipe.hvp(pipe).step(
            ...     [torch.tensor(3.0)], torch.ones(2), [torch.tensor(10.0)]
            ... )
            >>> loss.item(), grads[0].item(), product[0].item()
            (9.0, 6.0, 20.0)
        """
        vectors = self._vectors_of_call("step", vector)
        loss, duals, *aux = self._engine.run_step(params, batch, *vectors, key=key)
        pairs = map(_grad_and_product, self._engine.definition.wrap(duals), vectors)
        grads, products = map(self._engine.definition.unwrap, zip(*pairs, strict=True))
        results = Hvp(loss.primal, grads, products)
        return HvpAux(*results, *aux) if aux else results

    def value(self, params: Any, batch: Any, vector: Any, key: Tensor | None = None) -> Jvp:
        """The loss and its derivative in the direction of `vector`; runs forward only.

        Arguments and errors are those of `step`.

        Returns:
            A `Jvp`.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
            >>> stage, loss = (lambda w, x: w * x), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
            >>> fpipe.jvp(pipe).value([torch.tensor(3.0)], torch.ones(2), [torch.tensor(10.0)])
            Jvp(loss=tensor(9.), jvp=tensor(60.))
        """
        vectors = self._vectors_of_call("value", vector)
        loss: Dual = self._engine.run_value(params, batch, *vectors, key=key)
        return Jvp(*loss)

    def forward(
        self,
        params: Any,
        batch: Any,
        vector: Any,
        key: Tensor | None = None,
        *,
        out_dims: Any = OWN,
    ) -> Any:
        """The last stage's output and its derivative, a pair; runs forward only.

        Arguments and errors are those of `step`, and ``out_dims`` is that of `Pipeline.forward`.

        Returns:
            A pair of pytrees of one structure, in the order of the rows of the batch; the
            derivative has None for leaves of an integer dtype. A pipeline of one function returns a
            `ForwardAux`: the loss, as `value` returns it, and aux.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
            >>> stage, loss = (lambda w, x: w * x), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
            >>> fpipe.jvp(pipe).forward([torch.tensor(3.0)], torch.ones(2), [torch.tensor(10.0)])
            (tensor([3., 3.]), tensor([10., 10.]))
        """
        vectors = self._vectors_of_call("forward", vector)
        dims = self._engine.definition.out_dims if out_dims is OWN else out_dims
        outputs = self._engine.run_forward(params, batch, *vectors, key=key, out_dims=dims)
        leaves = pytree.flatten((params, batch, vectors))[0]
        if not is_within() and is_tracked(leaves):
            outputs = without_history(outputs, leaves, OF_DUALS)
        return (
            outputs._replace(loss=Jvp(*outputs.loss))
            if self._engine.definition.function
            else outputs
        )

    def programs(self, params: Any, batch: Any, vector: Any) -> tuple[Program, ...]:
        """The program of each rank, as `Pipeline.programs` returns them.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
            >>> stage, loss = (lambda w, x: w * x), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
            >>> params, vector = [torch.tensor(3.0)], [torch.tensor(1.0)]
            >>> len(fpipe.hvp(pipe).programs(params, torch.ones(2), vector))
            1
        """
        return self._pipeline.programs(params, batch, *self._vectors(vector))

    def _vectors_of_call(self, goal: Goal, vector: Any) -> tuple[Any, ...]:
        """The direction of each argument that may move; if they are wrong, on every rank."""
        return self._engine.validated(goal, lambda: self._vectors(vector))

    def _vectors(self, vector: Any) -> tuple[Any, ...]:
        wanted = self._engine.definition.wanted
        vectors = self._engine.definition.wrap(vector)
        if not isinstance(vectors, tuple) or len(vectors) != len(wanted):
            raise BatchError(
                f"vector={vector!r:.60} must be a tuple of {len(wanted)}, one direction for each "
                f"of ({', '.join(wanted)}), or None for one that does not move"
            )
        # A process without a part of the batch has no direction of it either.
        has_all = self.rank is None or "batch" not in wanted
        if has_all and all(direction is None for direction in vectors):
            raise BatchError(f"vector={vector!r} moves nothing: give one direction at least")
        return vectors


def _grad_and_product(dual: Dual | None, vector: Any) -> tuple[Any, Any]:
    """Gradient and product by an argument; None for both where another process has them."""
    if dual is None:
        return None, None
    return None if vector is None else dual.tangent, dual.primal


def jvp(pipe: Pipeline) -> Directional:
    """Derivatives of the loss in a direction, forward only: ``jvp(pipe).value``.

    Every stage becomes ``((p, v), (x, ẋ)) -> (y, ẏ)``, by `torch.func.jvp`, and so does the loss:
    forward-mode differentiation (Wengert, 1964, "A simple automatic derivative evaluation
    program"). No backward runs and no residual is kept. Fused attention has no forward-mode rule:
    it is traced as plain mathematics.

    Args:
        pipe: a pipeline, such as `fpipe.pipeline` or `fpipe.vmap` makes. The parameters may
            move, or the ``argnums`` of `fpipe.grad`.

    Returns:
        A `Directional`: ``value(params, batch, vector)`` returns ``(loss, jvp)`` and ``forward``
        the output with its derivative. It is the same as that of `fpipe.hvp`.

    Raises:
        StageError: `pipe` is no pipeline, takes a vector already, or has a state. When it is
            called: an operation has no right rule in forward mode; says what to call instead.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
        >>> vector = [torch.ones(()), torch.zeros(())]
        >>> fpipe.jvp(pipe).value(params, torch.ones(4), vector)
        Jvp(loss=tensor(6.), jvp=tensor(3.))
    """
    definition = definition_of("jvp", pipe)
    return Directional(derivative("jvp", definition, definition.wanted))


def hvp(pipe: Pipeline) -> Directional:
    """Products of the loss's Hessian with a vector: ``hvp(pipe).step``.

    One backward of the directional derivative gives the product, and the gradient with it
    (Pearlmutter, 1994, "Fast exact multiplication by the Hessian"). The schedule, the split
    backward and the sums over microbatches are those of any other step. Fused attention has no
    forward-mode rule: it is traced as plain mathematics.

    If `fpipe.grad` has made the pipeline, it is the Hessian by its ``argnums``, mixed derivatives
    included: how the gradient by the parameters changes with the batch, and the other way round.

    Args:
        pipe: a pipeline, such as `fpipe.pipeline`, `fpipe.vmap` or `fpipe.grad` makes.

    Returns:
        A `Directional`: ``step(params, batch, vector)`` returns ``(loss, grads, hvp)``.

    Raises:
        StageError: as for `jvp`.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
        >>> vector = [torch.ones(()), torch.zeros(())]
        >>> loss, grads, product = fpipe.hvp(pipe).step(params, torch.ones(4), vector)
        >>> loss.item(), [g.item() for g in grads], [h.item() for h in product]
        (6.0, [3.0, 2.0], [0.0, 1.0])
    """
    definition = definition_of("hvp", pipe)
    return Directional(derivative("hvp", definition, definition.wanted))


def ggnvp(pipe: Pipeline) -> Directional:
    """Products of the generalised Gauss–Newton matrix with a vector: ``ggnvp(pipe).step``.

    The matrix is J'HJ, with J the derivative of the last stage's output by the parameters and H the
    second derivative of the loss by that output (Schraudolph, 2002, "Fast curvature matrix-vector
    products for second-order gradient descent"): positive semidefinite wherever the loss is convex.
    Each stage runs a second time for its derivative.

    Args:
        pipe: a pipeline whose loss is one number.

    Returns:
        A `Directional`: ``step(params, batch, vector)`` returns ``(loss, grads, product)``, the
        product under the name ``hvp``.

    Raises:
        StageError: as for `jvp`, or the pipeline has many losses, or is one function, which does
            not say what its output is.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=False)
        >>> params = [torch.tensor(2.0), torch.tensor(3.0)]
        >>> vector = [torch.ones(()), torch.zeros(())]
        >>> fpipe.ggnvp(pipe).step(params, torch.ones(4), vector).hvp
        [tensor(18.), tensor(12.)]
    """
    definition = definition_of("ggnvp", pipe)
    refuse_argnums("ggnvp", definition, "fpipe.hvp(fpipe.grad(pipe, argnums)) is of the Hessian")
    return Directional(derivative("ggnvp", definition, ("params",), gauss_newton=True))
