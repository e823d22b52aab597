"""An optimizer over whole trees: each leaf by the recorded update, or all by a pair of functions.

A rule is a pair of pure functions:

    init(params) -> moments
    update(grads, moments, params, count, hyper) -> params, moments

A leaf has the default hyperparameters, those of its group, and those of a step. Its state may live
on the CPU, in its memory or in files, where its step is made then:

    param, grad ── to the CPU ──► the optimizer's step ──► param, back to its device
    state, on the CPU ──────────►        there         ──► state, on the CPU
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.dtensors import Placed, local, placements_of
from fpipe.errors import FpipeError, a_type, label_of
from fpipe.inputs.host_memory import CPU, Keep
from fpipe.inputs.params import Moved
from fpipe.inputs.signature import is_differentiable
from fpipe.parameters.holding import names_of
from fpipe.spec.convention import scaled
from fpipe.torch_internals import is_transformed
from fpipe.training.member_updates import UpdatesOfMembers
from fpipe.training.updates import EMA, Moments, Updates
from fpipe.transforms.norms import square_of

Path = tuple[Any, ...]
Which = str | Callable[[Path], bool]
Groups = Mapping[str, Mapping[str, Any] | None] | Sequence[tuple[Which, Mapping[str, Any] | None]]


class Group(NamedTuple):
    """Parameters that have hyperparameters of their own.

    Attributes:
        which: a name of a parameter or a pattern of `fnmatch` over names, such as ``"*.bias"``; or
            a function of a leaf's path, a tuple of keys and indices.
        hyper: what replaces the defaults; None for parameters that no step changes.
    """

    which: Which
    hyper: dict[str, Any] | None

    def holds(self, name: str, path: Path) -> bool:
        """Whether a parameter of this name and path belongs to the group."""
        if isinstance(self.which, str):
            return fnmatchcase(name, self.which)
        return bool(self.which(path))


def read_groups(groups: Groups | None) -> tuple[Group, ...]:
    """The groups, of which the first that holds a parameter has it, and the last holds all.

    Raises:
        FpipeError: `groups` is neither a mapping nor a sequence of pairs.
    """
    pairs = list(groups.items()) if isinstance(groups, Mapping) else groups or ()
    read = []
    for pair in pairs:
        well = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not well or not (isinstance(pair[0], str) or callable(pair[0])):
            raise FpipeError(
                f"groups has {pair!r:.80}: it must map names, or patterns of fnmatch, to "
                'hyperparameters ({"*.bias": {"weight_decay": 0.0}}), or be a list of such pairs, '
                "whose first may also be a function of a leaf's path"
            )
        which, hyper = pair
        if hyper is not None and not isinstance(hyper, Mapping):
            raise FpipeError(
                f"groups gives {which!r:.60} {a_type(hyper)}: it must be a mapping of "
                "hyperparameters, or None for parameters that no step changes"
            )
        read.append(Group(which, None if hyper is None else dict(hyper)))
    return (*read, Group("*", {}))


Trained = Callable[[optree.PyTreeSpec], Sequence[bool]]
"""Whether each leaf of parameters of this structure has a gradient."""


class Rule(Protocol):
    """An optimizer as a pair of pure functions of trees."""

    def init(self, params: Any) -> Any:
        """The state before the first step."""

    def update(
        self, grads: Any, moments: Any, params: Any, count: int, hyper: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Parameters and state after one step.

        Args:
            grads: in the structure of `params`, with None for leaves that stay as they are.
            moments: as `init` or the step before has returned it.
            params: the parameters.
            count: of the steps before.
            hyper: hyperparameters of this step, in place of the defaults.
        """


class LeafSteps(NamedTuple):
    """The step of an optimizer for each leaf of some parameters.

    Attributes:
        updates: the pure step of the optimizer.
        spec: the structure of the parameters.
        leaves: of the parameters.
        states: the moments of each leaf.
        places: how each leaf is divided over a mesh.
        hypers: the hyperparameters of each leaf.
        before: how many steps were made before.
        squares: find the squares of the gradients' norms, too.
        in_place: write into the leaves and their moments.
        unscale: what gradients are multiplied with first.
        keep: puts a tensor of the state where it lives on the CPU; None for beside its parameter.
    """

    updates: Updates | UpdatesOfMembers
    spec: optree.PyTreeSpec
    leaves: Sequence[Tensor]
    states: Sequence[Any]
    places: Sequence[Placed | None]
    hypers: Sequence[Mapping[str, Any]]
    before: int
    squares: bool
    in_place: bool = False
    unscale: float = 1.0
    keep: Keep = None

    def move(self, place: int, leaf: Tensor, grad: Tensor, state: Moments | None) -> Moved:
        """Update one leaf; it stays if it has no moments."""
        grad = local(grad)
        grad = grad if self.unscale == 1 else grad * self.unscale
        square = square_of(grad) if self.squares else None
        if state is None:
            return Moved(leaf, None, square)
        parts = {name: local(value) for name, value in state.items()}
        here = leaf
        if self.keep is not None:
            if is_transformed(leaf) or is_transformed(grad):
                raise FpipeError(
                    "offload= within a transform of torch.func, which follows no value to the CPU: "
                    "make the trainer without it"
                )
            here, grad = leaf.to(CPU), grad.to(CPU)
        value, parts = self.updates(
            here, grad, parts, self.hypers[place], self.before, in_place=self.in_place
        )
        if self.in_place:
            if here is not leaf:
                leaf.copy_(value)
            return Moved(leaf, state, square)
        if self.keep is not None:
            value, parts = value.to(leaf.device), _kept(parts, self.keep)
        return Moved(value, _placed(parts, leaf, self.places[place]), square)

    def move_others(self, moved: dict[int, Moved], grads: Any) -> None:
        """Add the leaves that have a gradient to those that have been moved, by place."""
        for place, grad in enumerate(entries_of(self.spec, grads, "grads")):
            if grad is not None and place not in moved:
                moved[place] = self.move(place, self.leaves[place], grad, self.states[place])

    def write_all(self, grads: list[Any], scale: Tensor | None) -> None:
        """Write the step of each leaf into it; each gradient goes as it is used.

        Args:
            grads: a list that holds the tree of gradients alone, and nothing afterwards.
            scale: what gradients are multiplied with; None for 1.
        """
        each = entries_of(self.spec, grads.pop(), "grads")
        each.reverse()
        for place, leaf in enumerate(self.leaves):
            grad = each.pop()
            if grad is not None:
                grad = grad if scale is None else scaled(local(grad), scale)
                self.move(place, leaf, grad, self.states[place])

    def trees(self, moved: Mapping[int, Moved]) -> tuple[Any, Any]:
        """Parameters and moments, of which those in other places are as they were."""
        values, states = list(self.leaves), list(self.states)
        for place, leaf in moved.items():
            values[place], states[place] = leaf.value, leaf.moments
        return pytree.unflatten(self.spec, values), pytree.of_entries(self.spec, states)


class LeafByLeaf:
    """An optimizer of torch, which treats each parameter by itself.

    Args:
        updates: its pure step.
        groups: as `read_groups` returns them.
        has_gradient: which leaves have a gradient.
        keep: as in `LeafSteps`.
    """

    def __init__(
        self,
        updates: Updates | UpdatesOfMembers,
        groups: Sequence[Group],
        has_gradient: Trained,
        keep: Keep = None,
    ) -> None:
        self._updates = updates
        self._groups = groups
        self._has_gradient = has_gradient
        self._keep = keep
        self._members: dict[optree.PyTreeSpec, list[int]] = {}
        defaults = updates.defaults
        self._defaults = [updates.replaced(defaults, group.hyper or {}) for group in groups]

    def of_members(self) -> LeafByLeaf:
        """The same optimizer for the members of an ensemble, stacked along dimension 0."""
        if isinstance(self._updates, UpdatesOfMembers):
            raise FpipeError("fpipe.vmap of a trainer that has members already: map it once")
        updates = UpdatesOfMembers(self._updates)
        return LeafByLeaf(updates, self._groups, self._has_gradient, self._keep)

    def init(self, params: Any) -> Any:
        """Zeros in the shapes of the optimizer's state, for each leaf that is trained."""
        leaves, spec = pytree.flatten(params)
        places, names = placements_of(spec), names_of(spec)
        moments: list[Any] = [None] * len(leaves)
        for index, hyper in self._moved(leaves, spec):
            leaf = leaves[index]
            here = leaf if self._keep is None else leaf.detach().to(CPU)
            if places[index] is not None:
                self._updates.check_divided(names[index], here, hyper)
            state = _kept(self._updates.init(here, hyper), self._keep)
            moments[index] = _placed(state, leaf, places[index])
        return pytree.of_entries(spec, moments)

    def trained(self, params: Any) -> Iterator[tuple[str, Tensor]]:
        """The leaves that are trained, by name."""
        leaves, spec = pytree.flatten(params)
        names = names_of(spec)
        return ((names[at], leaves[at]) for at, _ in self._moved(leaves, spec))

    def state_names(self, params: Any) -> dict[str, list[str]]:
        """The names of what `init` makes, by those of the leaves that are trained."""
        leaves, spec = pytree.flatten(params)
        names, moved = names_of(spec), self._moved(leaves, spec)
        if self._keep is not None:
            leaves = [torch.empty_like(leaf, device=CPU) for leaf in leaves]
        return {names[at]: self._updates.names(leaves[at], hyper) for at, hyper in moved}

    def held(self, value: Tensor, device: torch.device) -> Tensor:
        """A tensor of a state, read from a file to the CPU, where it is to live.

        One without dimensions is a number, which stays there; `device` is that of the parameter.
        """
        if not value.dim():
            return value
        return value.to(device) if self._keep is None else self._keep(value)

    def averages(self, params: Any, moments: Any) -> Any:
        """The average of each leaf that is trained, and the other leaves as they are."""
        spec = pytree.structure(params)
        states = entries_of(spec, moments, "state.moments")
        leaves = pytree.entries(spec, params)
        averaged = [
            leaf if state is None else state[EMA]
            for leaf, state in zip(leaves, states, strict=True)
        ]
        return pytree.of_entries(spec, averaged)

    def _moved(
        self, leaves: Sequence[Tensor], spec: optree.PyTreeSpec
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The place of each leaf that is trained, and its hyperparameters."""
        each = zip(leaves, self._members_of(spec), self._has_gradient(spec), strict=True)
        for index, (leaf, member, flag) in enumerate(each):
            if flag and self._groups[member].hyper is not None and _has_gradient(leaf):
                yield index, self._hyper(member, {})

    def update(
        self, grads: Any, moments: Any, params: Any, count: int, hyper: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Each leaf that has a gradient, and moments, moves."""
        step = self.step(moments, params, count, hyper)
        moved: dict[int, Moved] = {}
        step.move_others(moved, grads)
        return step.trees(moved)

    def step(
        self,
        moments: Any,
        params: Any,
        count: int,
        hyper: Mapping[str, Any],
        *,
        squares: bool = False,
        in_place: bool = False,
        unscale: float = 1.0,
    ) -> LeafSteps:
        """The step of each leaf by itself; arguments are those of `update`, and of `LeafSteps`."""
        leaves, spec = pytree.flatten(params)
        self._updates.replaced(self._updates.defaults, hyper)  # refuses those that are wrong
        hypers = [self._hyper(member, hyper) for member in range(len(self._groups))]
        return LeafSteps(
            self._updates,
            spec,
            leaves,
            entries_of(spec, moments, "state.moments"),
            placements_of(spec),
            [hypers[member] for member in self._members_of(spec)],
            count,
            squares,
            in_place,
            unscale,
            self._keep,
        )

    def _hyper(self, member: int, step: Mapping[str, Any]) -> dict[str, Any]:
        """A group's value wins over a step's, and a step's over the default."""
        return self._defaults[member] | dict(step) | (self._groups[member].hyper or {})

    def _members_of(self, spec: optree.PyTreeSpec) -> list[int]:
        """The number of the group of each leaf."""
        if spec not in self._members:
            self._members[spec] = [
                next(n for n, group in enumerate(self._groups) if group.holds(name, path))
                for name, path in zip(names_of(spec), pytree.key_paths(spec), strict=True)
            ]
        return self._members[spec]


class PairOfFunctions:
    """Pure functions of the caller's, as optax has them.

    Args:
        init: ``params -> state``.
        update: ``(grads, state, params) -> (updates, state)``; updates are added to parameters.
    """

    def __init__(self, init: Callable[[Any], Any], update: Callable[[Any, Any, Any], Any]) -> None:
        self.init = init
        self._update = update

    def update(
        self, grads: Any, moments: Any, params: Any, count: int, hyper: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """The results of `update`, added where there is a gradient."""
        if hyper:
            raise FpipeError(
                f"{', '.join(hyper)}: an optimizer that is a pair of functions has no "
                "hyperparameters; make it anew with other ones, or read them from its state"
            )
        result = self._update(grads, moments, params)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise FpipeError(
                f"optimizer: {label_of(self._update)} returned {result!r:.80}: it must return "
                "(updates, state)"
            )
        updates, moments = result
        leaves, spec = pytree.flatten(params)
        moved = [
            leaf if update is None else (leaf + local(update)).to(leaf.dtype)
            for leaf, update in zip(leaves, entries_of(spec, updates, "updates"), strict=True)
        ]
        return pytree.unflatten(spec, moved), moments


def _kept(state: Moments, keep: Keep) -> Moments:
    """The state of a parameter where it is to live; without dimensions it is a number."""
    if keep is None:
        return state
    return {name: keep(value) if value.dim() else value for name, value in state.items()}


def _placed(state: Moments, leaf: Tensor, place: Placed | None) -> Moments:
    """The state of a parameter that is a DTensor, placed as it is where it has its shape."""
    if place is None:
        return state
    return {
        name: place.made_of(value) if value.shape == leaf.shape else value
        for name, value in state.items()
    }


def _has_gradient(leaf: Tensor) -> bool:
    return not leaf.is_meta and is_differentiable(leaf)


def entries_of(spec: optree.PyTreeSpec, tree: Any, name: str) -> list[Any]:
    """The entries of a tree in the places of the leaves of the parameters.

    Raises:
        FpipeError: it has another structure.
    """
    try:
        return pytree.entries(spec, tree)
    except ValueError as error:
        raise FpipeError(f"{name} has another structure than params: {error}") from error
