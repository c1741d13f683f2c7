"""What a step is compiled to: one program or several, and the memory that they need."""

import dataclasses
from typing import Any, Generic, TypeVar

import jax

from funcgrad.trees import PyTree

_Stage = TypeVar("_Stage")


@dataclasses.dataclass(frozen=True)
class MemoryAnalysis:
    """The memory of a step, in bytes, under JAX's names (`jax.stages.Compiled.memory_analysis`).

    Attributes:
      argument_size_in_bytes: state and batch.
      temp_size_in_bytes: what is needed beside arguments and output while the step runs: of several programs, which run one
        after the other, that of the largest.
      output_size_in_bytes: the new state and the metrics.
      alias_size_in_bytes: how much of the output lies in the memory of the arguments.
    """

    argument_size_in_bytes: int
    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int

    @property
    def total_size_in_bytes(self) -> int:
        """The most that is needed at once."""
        new = self.output_size_in_bytes - self.alias_size_in_bytes
        return self.argument_size_in_bytes + self.temp_size_in_bytes + new


@dataclasses.dataclass(frozen=True)
class _Programs(Generic[_Stage]):
    """The programs of a step: `step` alone, or `microbatch`, `tail` and `update`.

    Attributes:
      programs: by name.
      inputs: what they are called with, or its shapes.
      copied: what of it is copied first, because it must stay.
    """

    programs: dict[str, _Stage]
    inputs: PyTree
    copied: PyTree = ()


class Lowered(_Programs[jax.stages.Lowered]):
    """The programs of a step, not yet compiled: `programs` holds `step` alone, or `microbatch`, `tail` and `update`."""

    def compile(self) -> "Compiled":
        """Compile all programs."""
        return Compiled({name: program.compile() for name, program in self.programs.items()}, self.inputs, self.copied)

    def as_text(self) -> str:
        """The programs in StableHLO, one after the other."""
        return "\n".join(program.as_text() for program in self.programs.values())


class Compiled(_Programs[jax.stages.Compiled]):
    """The compiled programs of a step, by the same names."""

    def memory_analysis(self) -> MemoryAnalysis:
        """The memory that the step needs."""
        found: list[Any] = [program.memory_analysis() for program in self.programs.values()]
        if len(found) == 1:
            names = [field.name for field in dataclasses.fields(MemoryAnalysis)]
            return MemoryAnalysis(**{name: getattr(found[0], name) for name in names})
        last, copied = found[-1], _bytes(self.copied)
        return MemoryAnalysis(
            argument_size_in_bytes=_bytes(self.inputs),
            temp_size_in_bytes=max(each.temp_size_in_bytes for each in found) + copied,
            output_size_in_bytes=last.output_size_in_bytes,
            alias_size_in_bytes=0 if copied else last.alias_size_in_bytes,
        )


def _bytes(tree: PyTree) -> int:
    return sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "itemsize") or hasattr(leaf, "dtype")
    )
