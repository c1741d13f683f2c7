"""A module as values: how it is made of three groups of variables, and what a loss does to them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
from flax import nnx

from funcgrad import reducers, trees
from funcgrad.dataflow import handed_through
from funcgrad.loss import read_loss
from funcgrad.nnx.variables import values_of
from funcgrad.trees import PyTree

TRAINED, FIXED, CARRIED = range(3)
Path = tuple[Any, ...]


class Place(NamedTuple):
    """A variable: where it is, which leaves of its group it holds, and their structure."""

    path: Path
    leaves: list[int]
    treedef: Any


class Written(Exception):
    """The loss changes variables that were taken for fixed ones."""

    def __init__(self, paths: set[Path]):
        super().__init__(paths)
        self.paths = paths


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)  # one for each structure, so that telling two apart takes no time
class Layout:
    """How a module is made of three groups of variables: trained, fixed, carried."""

    graphdef: Any
    treedefs: tuple[Any, ...]

    @functools.cached_property
    def places(self) -> tuple[list[Place], ...]:
        """For each group, where its variables are, and which leaves they hold."""
        places = []
        for treedef in self.treedefs:
            numbered = nnx.to_flat_state(treedef.unflatten(range(treedef.num_leaves)))
            places.append([Place(path, *jax.tree.flatten(leaf)) for path, leaf in numbered])
        return tuple(places)

    def state(self, kind: int, values: PyTree) -> Any:
        """The variables of a group, from the values in them."""
        return self.treedefs[kind].unflatten(jax.tree.leaves(values))

    def merge(self, values: Sequence[PyTree]) -> Any:
        """The module, from the values of all groups."""
        return nnx.merge(self.graphdef, *(self.state(kind, group) for kind, group in enumerate(values)))

    def read(self, model: Any, before: Sequence[PyTree]) -> tuple[list[Any], ...]:
        """The values of all groups after the loss, which had those of `before`.

        Raises:
          ValueError: the loss changed the structure of the module, or a shape.
        """
        graphdef, state = nnx.split(model)
        variables = dict(nnx.to_flat_state(state))
        _check_structure(self, graphdef, variables)
        values = []
        for places, group in zip(self.places, before, strict=True):
            after = list(group)
            for place in places:
                leaves, treedef = jax.tree.flatten(variables[place.path])
                kinds = [trees.describe(leaf) for leaf in leaves]
                old_kinds = [trees.describe(group[number]) for number in place.leaves]
                if kinds != old_kinds or treedef != place.treedef:
                    old, new = (values_of(tree.unflatten(k)) for tree, k in ((place.treedef, old_kinds), (treedef, kinds)))
                    raise ValueError(
                        f"the loss changes {name_of(place.path)} from {old} to {new}. What microbatches hand on must keep its "
                        "structure, shapes and dtypes"
                    )
                for number, leaf in zip(place.leaves, leaves, strict=True):
                    after[number] = leaf
            values.append(after)
        return tuple(values)

    def changes(self, before: Sequence[list[Any]], after: Sequence[list[Any]], same: Sequence[bool]) -> tuple[Any, ...]:
        """What is carried on to the next microbatch.

        Args:
          before, after: the values of all groups.
          same: for each of them, whether the loss left it as it was.

        Raises:
          ValueError: the loss changed what is trained.
          Written: it changed what was taken for fixed.
        """
        left, changed = iter(same), []
        for places, group in zip(self.places, before, strict=True):
            kept = [next(left) for _ in group]
            changed.append({place.path for place in places if not all(kept[number] for number in place.leaves)})
        if changed[TRAINED]:
            raise ValueError(
                f"the loss assigns to {names_of(changed[TRAINED])}, which the optimizer trains. Microbatches can hand on only "
                "what is not trained: make it another nnx.Variable, or leave it out of the optimizer's wrt"
            )
        if changed[FIXED]:
            raise Written(changed[FIXED])
        first = len(same) - len(before[CARRIED])
        pairs = zip(before[CARRIED], after[CARRIED], same[first:], strict=True)
        return tuple(old if unchanged else new for old, new, unchanged in pairs)


def functional_loss(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """`loss_fn` of values in place of a module: `(params, *args, (layout, fixed), carried) -> (loss, (carried, aux))`."""

    def functional(params: PyTree, *arguments: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        *args, (layout, fixed), carried = arguments
        before = jax.tree.leaves(params), list(fixed), list(carried)

        def run(before: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[list[Any], ...]]:
            model = layout.merge(before)
            loss, aux = read_loss(loss_fn(model, *args, **kwargs), has_aux)
            reducers.check_known(aux)
            return (loss, aux), layout.read(model, before)

        # Recorded, because only that tells what the loss changed: a layer that is jitted, checkpointed or scanned hands out
        # all its variables anew.
        closed, like = jax.make_jaxpr(run, return_shape=True)(before, args, kwargs)
        results = jax.extend.core.jaxpr_as_fun(closed)(*jax.tree.leaves((before, args, kwargs)))
        (loss, aux), after = jax.tree.structure(like).unflatten(results)
        total = len(jax.tree.leaves(before))
        numbers = handed_through(closed.jaxpr)[-total:]
        same = [number == place for place, number in enumerate(numbers)]
        return loss, (layout.changes(before, after, same), aux)

    functional.__name__ = functional.__qualname__ = getattr(loss_fn, "__name__", "loss_fn")
    return functional


def name_of(path: Path) -> str:
    """The name of a variable, for errors: `model.dense.kernel`."""
    return ".".join(("model", *map(str, path)))


def names_of(paths: Iterable[Path]) -> str:
    """The names of some variables, for errors."""
    return trees.abbreviate(sorted(map(name_of, paths)))


def _check_structure(layout: Layout, graphdef: Any, variables: dict[Path, Any]) -> None:
    known = {place.path for places in layout.places for place in places}
    new, gone = variables.keys() - known, known - variables.keys()
    if new or gone:
        what = f"adds {names_of(new)} to the module" if new else f"takes {names_of(gone)} out of the module"
        raise ValueError(
            f"the loss {what}, and what microbatches hand on must keep its structure. Make all variables before the first "
            "step; return what is only to be seen, as from self.sow, as aux, and take it out in the loss: "
            "nnx.pop(model, nnx.Intermediate)"
        )
    if graphdef != layout.graphdef:
        changed = set(layout.graphdef.attributes) ^ set(graphdef.attributes)
        attributes = sorted({str(name) for name, _ in changed if not str(name).startswith("_pytree__")})
        what = ": " + trees.abbreviate(attributes) if attributes else ", or the kind of a variable"
        raise ValueError(
            f"the loss changes the structure of the module, or an attribute that is no variable{what}. Do that outside of the "
            "step (model.train() for example), or make it a variable"
        )
