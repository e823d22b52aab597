"""A trainer as what saves its checkpoints and reads them: the methods that users see."""

from __future__ import annotations

from os import PathLike
from typing import Any

from fpipe.checkpoint.checkpoint_writer import Content, PendingSave, absolute
from fpipe.errors import FpipeError
from fpipe.pipelines import Pipeline, engine_of
from fpipe.savers import savers_of
from fpipe.training.loss_scaling import LossScaling
from fpipe.training.saving import content_of, load
from fpipe.training.stepping import clones
from fpipe.training.train_step import TrainState
from fpipe.training.trees import LeafByLeaf, Rule


class Savable:
    """The methods of a trainer that write and read checkpoints.

    Args:
        pipe: computes loss and gradients.
        rule: makes parameters and state of the next step.
        donate: that step writes into those of the last one.
        scaling: of the loss; None for none.
    """

    def __init__(
        self,
        pipe: Pipeline,
        rule: Rule,
        *,
        donate: bool = False,
        scaling: LossScaling | None = None,
    ) -> None:
        self.pipe = pipe
        self._rule = rule
        self._donate = donate
        self._scaling = scaling

    def save(
        self,
        path: str | PathLike[str],
        params: Any,
        state: TrainState,
        *,
        model_state: Any = None,
        step: Any = None,
        extra: Any = None,
        keep: int | None = None,
    ) -> None:
        """Write parameters and states to a directory of `torch.distributed.checkpoint`.

        Over a process group all ranks call it, and each writes what it has. The directory is
        written under another name and renamed, so that a crash leaves the last whole one.

        Args:
            path: of the directory. A checkpoint that is there is replaced.
            params: as `step` returned them.
            state: as `step` returned it.
            model_state: as `step` returned it, of a pipeline with ``has_state=True``.
            step: any number or string to be found again.
            extra: what else is to be found again: trees of tensors, numbers and strings, such as
                the state of a data loader; on the first rank.
            keep: how many checkpoints stay in the parent directory, the oldest go; None for all.

        Raises:
            FpipeError: the state is that of a pair of functions, which has no names; or
                `model_state` is missing.
            PipelineError: a process cannot write, or something else is at `path`; or the last
                `save_async` has failed and nobody has waited for it.
        """
        content = self._content(params, state, model_state, step, extra, keep)
        savers = savers_of(engine_of(self.pipe).definition, content.tensors)
        savers.write(absolute(path), content, keep)

    def save_async(
        self,
        path: str | PathLike[str],
        params: Any,
        state: TrainState,
        *,
        model_state: Any = None,
        step: Any = None,
        extra: Any = None,
        keep: int | None = None,
    ) -> PendingSave:
        """Write as `save` does, in a thread, while the next steps run.

        Nothing is copied: a step changes nothing that it is given, so what is written stays as it
        is. Change none of it in place before the end. With ``donate=True``, whose steps do, a copy
        is made first. The processes talk over a group of their own, which the first call makes.
        Only one checkpoint is written at a time: the next save waits.

        Args:
            path: as for `save`.
            params: as for `save`.
            state: as for `save`.
            model_state: as for `save`.
            step: as for `save`.
            extra: as for `save`.
            keep: as for `save`.

        Returns:
            A `PendingSave`: ``wait()`` returns when the checkpoint is whole, and raises what has
            failed; ``done()`` asks. Wait before `destroy_process_group`.

        Raises:
            FpipeError: as for `save`, and so is PipelineError, which ``wait()`` raises too.

        Example:
            >>> import os, tempfile, torch, fpipe
            >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
            >>> stages = [lambda w, x: x * w, lambda w, x: x + w]
            >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
            >>> trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.5)
            >>> params = [torch.tensor(2.0), torch.tensor(0.0)]
            >>> state = trainer.init(params)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     pending = trainer.save_async(os.path.join(folder, "step-0"), params, state)
            ...     moved = trainer.step(params, state, torch.ones(4))
            ...     pending.wait()
            ...     torch.equal(trainer.load(os.path.join(folder, "step-0")).params[0], params[0])
            True
        """
        if self._donate:
            params, state = clones(params, state)
        content = self._content(params, state, model_state, step, extra, keep)
        savers = savers_of(engine_of(self.pipe).definition, content.tensors)
        return savers.start(absolute(path), content, keep)

    def load(
        self,
        path: str | PathLike[str],
        *example: Any,
        like: Any = None,
        like_state: Any = None,
    ) -> Any:
        """Read what `save` has written; over a process group each rank what it needs.

        The number of processes, the schedule and the mesh may be others than those that saved.

        Args:
            path: of the directory.
            example: the batch, or meta tensors of its shapes: what a pipeline of one function or of
                a module, over a process group, is traced on.
            like: parameters, or tensors of their shapes, in the structure that they are to have;
                needed where that has other nodes than dicts, lists and tuples, and for DTensors.
                The pipeline of a module knows it.
            like_state: the same of the model's state, whose nodes may be `fpipe.nn.BatchStats` too.

        Returns:
            A named tuple `Saved`: ``(params, state, step, extra)``; with ``has_state`` a
            `SavedState`, which has ``model_state`` after those.

        Raises:
            BatchError: the directory is none that `save` has written to its end, is mixed of
                several, or does not fit; so where it was saved with another optimizer.
            PipelineError: over a process group, another rank has raised this.
        """
        rule = self._named_rule("load")
        return load(self.pipe, rule, path, example, like, like_state, self._scaling)

    def _content(
        self,
        params: Any,
        state: TrainState,
        model_state: Any,
        step: Any,
        extra: Any,
        keep: int | None,
    ) -> Content:
        """The content that this process writes; where one process fails, no other goes on."""

        def read() -> Content:
            self._named_rule("save")
            if keep is not None and (not isinstance(keep, int) or keep < 1):
                raise FpipeError(
                    f"keep={keep!r} must be a number of checkpoints, 1 or more, or None"
                )
            return content_of(self.pipe, params, state, model_state, step, extra)

        return engine_of(self.pipe).each("save its parameters", read)

    def _named_rule(self, method: str) -> LeafByLeaf:
        if isinstance(self._rule, LeafByLeaf):
            return self._rule
        raise FpipeError(
            f"trainer.{method} of an optimizer that is a pair of functions: its state has no "
            "names; save what init and update return by torch.save"
        )
