"""Figures that add up."""

import operator
from typing import Self


class Sums:
    """A dataclass of numbers, which are added, subtracted and multiplied field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(operator.sub, vars(self).values(), vars(other).values()))

    def __mul__(self, often: float) -> Self:
        return type(self)(*(often * each for each in vars(self).values()))
