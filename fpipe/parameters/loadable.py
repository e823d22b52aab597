"""A pipeline as what makes and reads its own parameters: the methods that users see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from fpipe import random
from fpipe.checkpoint.checkpoint_reader import Naming, reading
from fpipe.checkpoint.checkpoint_writer import Content, absolute
from fpipe.engine import Engine
from fpipe.parameters.holding import (
    InitFn,
    Make,
    drawn,
    either,
    held,
    keeping,
    leaves_read_here,
    saved,
    taken,
    whole,
)
from fpipe.parameters.replica_parameters import divided, replicated
from fpipe.parameters.savers import savers_of


class Loadable:
    """The methods of any pipeline that make its parameters and state before its first step."""

    _engine: Engine

    def init(
        self,
        init_fn: InitFn,
        key: Tensor,
        *example: Any,
        shapes: Any = None,
        storage: str | PathLike[str] | None = None,
    ) -> Any:
        """Make parameters; over a process group each process makes those of its own stages alone.

        The value of a leaf depends on `key` and its name, and so neither on the schedule nor on the
        number of processes.

        Args:
            init_fn: ``(key, name, like) -> tensor``, called for each leaf: `key` is its own, `name`
                the keys and indices of its path joined by dots (for a module, as in
                ``named_parameters()``), `like` a meta tensor of the shape and dtype that it must
                return.
            key: a key of `fpipe.random`, the same on every rank.
            example: what `step` takes after the parameters, or meta tensors of those shapes. A
                pipeline of one function, or of a module, is traced on them, over a process group
                and on several ``devices``, to learn which leaves its stages read. Not needed where
                it has run before, or on one device in one process, or for stages that are
                functions of their own.
            shapes: parameters as for `step`, of which shapes and dtypes count, such as those that
                were made under ``torch.device("meta")``. The pipeline of a module knows them.
            storage: a directory on a disk: leaves become memory-mapped files in it, which the
                system reads and writes as it has memory (DeepSpeed calls it offload to NVMe). They
                have no names, and are gone with the process. A step only reads them; that of
                `fpipe.train` with ``donate=True`` writes the new ones into them.

        Returns:
            Parameters in the structure of `shapes`. Over a process group there is None in place of
            other processes' stages, and of one function a meta tensor for each leaf that this
            process does not read: `step` takes such parameters. They lie on the device of the
            process group or of each rank, if it has one, and else where `init_fn` made them; with
            an ``offload_policy`` on the CPU.

        Raises:
            BatchError: `shapes` is no such tree, or `init_fn` returns something else.
            StageError: `shapes` or `example` is missing; or `storage` is given where stages compute
                on another device than the CPU, without an ``offload_policy``.
            FpipeError: `storage` cannot be a directory, or its disk is full.
            PipelineError: over a process group, where all ranks must call this, another rank has
                failed, or was given another key.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stage, loss = (lambda w, x: x @ w), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage, stage], loss, schedule, compile=False)
            >>> shapes = [torch.empty(3, 3, device="meta")] * 2
            >>> normal = lambda key, name, like: fpipe.random.normal(key, like.shape, like.dtype)
            >>> params = pipe.init(normal, fpipe.random.key(0), shapes=shapes)
            >>> [tuple(leaf.shape) for leaf in params], torch.equal(*params)
            ([(3, 3), (3, 3)], False)
        """
        likes, traced_on = self._shapes(shapes), self._traced_on(example)
        home = self._home()
        return held(
            self._engine,
            lambda _: drawn(init_fn, key),
            likes,
            traced_on,
            home=home,
            key=key,
            storage=storage,
        )

    def load(
        self,
        path: str | PathLike[str],
        *example: Any,
        shapes: Any = None,
        rename: Callable[[str], str] | None = None,
        strict: bool = True,
        init_fn: InitFn | None = None,
        key: Tensor | None = None,
        storage: str | PathLike[str] | None = None,
    ) -> Any:
        """Read parameters from files; over a process group each process reads those that it needs.

        Args:
            path: a file of safetensors, a directory with such files and perhaps an index, as
                Hugging Face writes them, or a directory of ``torch.distributed.checkpoint``.
            example: as for `init`.
            shapes: as for `init`; tensors of other dtypes are converted.
            rename: from the name of a leaf (as for `init`) to that in the checkpoint.
            strict: refuse a checkpoint that has more than the parameters. Buffers of a module, and
                other names of tied parameters with the same numbers, are no more.
            init_fn: as for `init`, makes parameters that the checkpoint lacks, such as adapters of
                a model that was trained without them, or all but the adapters. None refuses them.
            key: as for `init`; None for ``fpipe.random.key(0)``.
            storage: as for `init`.

        Returns:
            As `init`, on the default device, that of each rank or that of the process group.

        Raises:
            BatchError: a parameter is missing or does not fit, there are more, or a file is broken;
                says which.
            StageError: as for `init`, as is PipelineError.
        """

        def reader(names: Sequence[str]) -> Make:
            if init_fn is None:
                return reading(path, names, self._naming(), rename, strict)
            read = reading(path, names, self._naming(), rename, strict, whole=False)
            return either(read, drawn(init_fn, random.key(0) if key is None else key))

        likes, traced_on = self._shapes(shapes), self._traced_on(example)
        own_key = None if init_fn is None else key
        return held(
            self._engine,
            reader,
            likes,
            traced_on,
            home=self._engine.definition.device,
            key=own_key,
            storage=storage,
        )

    def save(self, path: str | PathLike[str], params: Any) -> None:
        """Write parameters to a directory of `torch.distributed.checkpoint`, which `load` reads.

        Over a process group all ranks call this, and each writes what it has; so do all replicas.
        The directory is written under another name and renamed when it is whole, so that a crash
        leaves the last one. ``trainer.save`` writes the state of an optimizer, too.

        Args:
            path: of the directory. A checkpoint that is there is replaced.
            params: parameters as for `step`, frozen ones too: their names are those of `init`.

        Raises:
            BatchError: `params` are none of this pipeline, or have no data.
            PipelineError: a process cannot write, or something else is at `path`.

        Example:
            >>> import os, tempfile, torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stage, loss = (lambda w, x: x @ w), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage, stage], loss, schedule, compile=False)
            >>> params = [torch.eye(2), torch.ones(2, 2)]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     pipe.save(os.path.join(folder, "last"), params)
            ...     again = pipe.load(os.path.join(folder, "last"), shapes=params)
            >>> all(map(torch.equal, again, params))
            True
        """
        leaves = self._engine.each("save its parameters", lambda: saved(self._engine, params))
        savers_of(self._engine.definition, leaves).write(absolute(path), Content(leaves))

    def place(self, params: Any, *example: Any) -> Any:
        """Put parameters on the devices of the ranks that read them.

        Args:
            params: as for `step`, on any device.
            example: as for `init`, whose errors are raised here too. A pipeline of one function, or
                of a module, needs it also for several ``devices`` in one process.

        Returns:
            As `init`. A leaf that lies where it should is the caller's own, and no copy; one that
            several ranks read lies on the device of the first of them. Copies require a gradient
            where the leaf does.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stage, loss = (lambda w, x: x @ w), (lambda y, _: y.square().mean())
            >>> devices = ["cpu", "cpu"]  # such as ["cuda:0", "cuda:1"]
            >>> pipe = fpipe.pipeline([stage, stage], loss, schedule, devices=devices)
            >>> params = pipe.place([torch.eye(2), torch.ones(2, 2)])
            >>> [str(leaf.device) for leaf in params]
            ['cpu', 'cpu']
        """
        maker, traced_on = partial(taken, params), self._traced_on(example)
        return held(self._engine, maker, params, traced_on, home=self._home(), name="params")

    def replicate(self, params: Any) -> Any:
        """Give every replica the parameters of the first one.

        Args:
            params: as for `step`, of the same shapes on all replicas, whose processes all call
                this. Leaves may be DTensors over dimensions that hold no replicas.

        Returns:
            New tensors in the structure of `params`. Leaves on the meta device stay as they are.

        Raises:
            StageError: the pipeline is made without ``data=``.
            BatchError: a leaf is no tensor, or divided over replicas already.
        """
        definition = self._engine.definition
        return replicated(params, definition.data, keeping(definition, None))

    def shard(self, params: Any, *, storage: str | PathLike[str] | None = None) -> Any:
        """Divide the parameters of the first replica over all replicas (FSDP, ZeRO-3).

        Each leaf is divided along its first dimension as `torch.chunk` divides it, 7 rows over 2
        into 4 and 3; along another one where that is divided over a further dimension of the mesh,
        as by tensor parallelism; and not at all, ``Replicate``, where there is none, as of a
        scalar.

        Args:
            params: whole parameters, as for `replicate`: all of them, or what `local` left.
            storage: as for `init`.

        Returns:
            DTensors over the dimensions of ``data=`` in the structure of `params`, to be passed to
            `step`, whose gradients are placed as they are.

        Raises:
            StageError: the pipeline is made without ``data=``.
            BatchError: a leaf is no tensor, or divided over replicas already.
        """
        definition = self._engine.definition
        return divided(params, definition.data, keeping(definition, storage))

    def load_state(
        self,
        path: str | PathLike[str],
        *,
        shapes: Any = None,
        rename: Callable[[str], str] | None = None,
    ) -> Any:
        """Read a state from files, all of it on each process, as `step` returns it.

        Args:
            path: as for `load`. Anything but the state is passed over.
            shapes: a state as for `step`, of which shapes and dtypes count. The pipeline of a
                module knows it.
            rename: from the name of a leaf to that in the checkpoint.

        Returns:
            The state in the structure of `shapes`, on the default device, that of the process group
            or, with ``devices``, that of the first stage.

        Raises:
            BatchError: a leaf is missing or has another shape; says which.
            StageError: `shapes` is missing, or the pipeline has no state.
            PipelineError: over a process group, where all ranks must call this, another rank has
                failed.
        """

        def reader(names: Sequence[str]) -> Make:
            return reading(path, names, Naming(), rename, strict=False)

        return whole(self._engine, reader, shapes)

    def own(self, params: Any) -> dict[str, Tensor]:
        """The leaves that this process reads, by name: what it trains, and what it has to save.

        Args:
            params: parameters as for `step`, or what has their structure: gradients, averages,
                moments of an optimizer.

        Returns:
            The leaves themselves, by the names that `load` reads, frozen ones too. In one process
            they are all of them; over a process group those of its own stages, and of one function
            or a module those that its stages have read in any call so far. A leaf that
            several ranks read is on each of them. None, as gradients have it, is left out.

        Raises:
            BatchError: `params` is no such tree, or it is not known yet what this process reads.

        Example:
            >>> import torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stage, loss = (lambda p, x: x @ p["w"]), (lambda y, _: y.square().mean())
            >>> pipe = fpipe.pipeline([stage, stage], loss, schedule, compile=False)
            >>> own = pipe.own([{"w": torch.eye(2)}, {"w": torch.ones(2, 2)}])
            >>> optimizer = torch.optim.SGD(own.values())
            >>> list(own)
            ['0.w', '1.w']
        """
        return leaves_read_here(self._engine, params)

    def _home(self) -> torch.device | None:
        """Where a process of a group holds its own; one alone leaves leaves where they are."""
        return None if self._engine.definition.group is None else self._engine.definition.device

    def _shapes(self, shapes: Any) -> Any:
        """The shapes of the parameters."""
        return shapes

    def _naming(self) -> Naming:
        """The names of parameters in a checkpoint, as far as they are known."""
        return Naming()

    def _traced_on(self, example: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of `step` that a trace takes: all but the key."""
        definition = self._engine.definition
        keyed = definition.reads_key and not definition.convention.vectors
        return self._engine.reader.in_order(example, None, {})[0] if keyed else example
