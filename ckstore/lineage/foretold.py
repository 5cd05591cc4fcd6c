"""What an object was foretold to take, kept for the object that is stored against it: plans that stick.

What was best for an object last time is nearly always best again. Sizes that were estimated twice, and hardly differed,
count for the version after those, too; then for two versions, for four, and so on, while layers take what they should.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

#: Sizes hold for so many versions at most after the one that they were estimated for, ...
MOST_VERSIONS = 15

#: ... where estimates differed from those before by so much at most, ...
CHANGE = 0.04

#: ... and while each layer takes this much more or less than foretold, beside what the first one did, ...
SLACK = 0.05

#: ... or so many bytes; ...
_FEW_BYTES = 64

#: ... and where an object takes this much more, the ways to store it are looked at before it is stored.
EXCESS = 0.2

#: A layer by its name, and by the place in a chain of what it is stored against: 0 for the parent, or for none.
Layer = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Foretold:
    """Estimated sizes of an object's layers.

    Attributes
    ----------
    sizes
        Bytes by layer.
    ratios
        Bytes that each layer took of the object whose sizes were estimated, over those foretold.
    lasts
        For how many versions sizes hold that are found now.
    left
        For how many more these do.
    """

    sizes: Mapping[Layer, float]
    ratios: tuple[float, ...] = ()
    lasts: int = 0
    left: int = 0

    def found(self, sizes: Mapping[Layer, float]) -> Foretold:
        """These sizes, now that they were estimated again."""
        # How far it is to what the parent is stored against differs from one version to the next, and integers get
        # longer where residuals get shorter.
        near = [layer for layer in self.sizes.keys() & sizes.keys() if layer[1] == 0 and layer[0] != "delta"]
        steady = all(abs(sizes[layer] - self.sizes[layer]) <= CHANGE * self.sizes[layer] + _FEW_BYTES for layer in near)
        return Foretold({**self.sizes, **sizes}, (), min(2 * self.lasts + 1, MOST_VERSIONS) if steady else 0)

    def at(self, names: Iterable[str], places: Sequence[int]) -> Mapping[Layer, float] | None:
        """All sizes, with those of layers of these names against what is at these places; None where one is unknown.

        Above the parent's own base the nearest place that is known counts.

        Examples
        --------
        >>> Foretold({("delta", 0): 5, ("delta", 1): 7, ("delta", 4): 8}).at(["delta"], [0, 1, 3])
        {('delta', 0): 5, ('delta', 1): 7, ('delta', 4): 8, ('delta', 3): 8}
        """
        found = dict(self.sizes)
        for name in names:
            far = [place for other, place in self.sizes if other == name and place > 1]
            for place in places:
                if (name, place) not in found:
                    if place <= 1 or not far:
                        return None
                    found[name, place] = found[name, min(far, key=lambda other: abs(other - place))]
        return found

    def after(self, layers: Sequence[tuple[float, float]]) -> Foretold:
        """For the next object, after one with such layers: nothing holds where one of them is not what was foretold.

        Parameters
        ----------
        layers
            The bytes of each, and the bytes foretold: an exact layer tells nothing of how far weights move.
        """
        if not self.ratios:
            ratios = tuple(taken / max(foretold, 1.0) for taken, foretold in layers)
            return replace(self, ratios=ratios, left=self.lasts)
        if any(
            abs(taken - ratio * foretold) > SLACK * ratio * foretold + _FEW_BYTES
            for (taken, foretold), ratio in zip(layers, self.ratios, strict=True)
        ):
            return replace(self, lasts=0, left=0)
        return replace(self, left=self.left - 1)

    def is_exceeded(self, layers: Sequence[tuple[float, float]]) -> bool:
        """Whether an object takes far more than foretold, so that another way may be better."""
        expected = sum(ratio * foretold for (_, foretold), ratio in zip(layers, self.ratios, strict=False))
        return bool(self.ratios) and sum(taken for taken, _ in layers) > (1 + EXCESS) * expected + _FEW_BYTES
