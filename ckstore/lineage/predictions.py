"""Size predictions, reused for an object's next version.

The best encoding of an object is nearly always the same as in the version before. Sizes that two estimates agree on
also count for the next version; then for two versions, for four, and so on, while layers match their predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

#: Predictions are reused for at most this many versions after the estimate, ...
MOST_VERSIONS = 15

#: ... if estimates differ from earlier ones by at most this part, ...
CHANGE = 0.04

#: ... and while each layer deviates from its prediction, scaled by the first layer's ratio, by at most this part ...
SLACK = 0.05

#: ... or this number of bytes; ...
_FEW_BYTES = 64

#: ... and if an object exceeds its prediction by this part, it is estimated again before it is stored.
EXCESS = 0.2

#: A layer by its name, and by the chain place of its base: 0 for the parent, or for none.
Layer = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Estimated sizes of an object's layers.

    Attributes
    ----------
    sizes
        Bytes by layer.
    ratios
        Actual sizes of the layers of the estimated object, over the predictions.
    lasts
        The number of versions that sizes found now will be reused for.
    left
        The number of versions that these sizes will still be reused for.
    """

    sizes: Mapping[Layer, float]
    ratios: tuple[float, ...] = ()
    lasts: int = 0
    left: int = 0

    def found(self, sizes: Mapping[Layer, float]) -> Predictions:
        """Return predictions of these sizes, after a second estimate."""
        # The distance to the parent's base differs between versions, and integers get longer as residuals get shorter.
        near = [layer for layer in self.sizes.keys() & sizes.keys() if layer[1] == 0 and layer[0] != "delta"]
        steady = all(abs(sizes[layer] - self.sizes[layer]) <= CHANGE * self.sizes[layer] + _FEW_BYTES for layer in near)
        return Predictions({**self.sizes, **sizes}, (), min(2 * self.lasts + 1, MOST_VERSIONS) if steady else 0)

    def at(self, names: Iterable[str], places: Sequence[int]) -> Mapping[Layer, float] | None:
        """Return all sizes, with those of these layers against bases at these places; None if one is unknown.

        Above the parent's own base the nearest known place counts.

        Examples
        --------
        >>> Predictions({("delta", 0): 5, ("delta", 1): 7, ("delta", 4): 8}).at(["delta"], [0, 1, 3])
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

    def after(self, layers: Sequence[tuple[float, float]]) -> Predictions:
        """Return the predictions for the next object; none remain valid if an actual size deviates.

        Parameters
        ----------
        layers
            The actual and predicted bytes of each layer: an exact layer does not show how far weights move.
        """
        if not self.ratios:
            ratios = tuple(taken / max(predicted, 1.0) for taken, predicted in layers)
            return replace(self, ratios=ratios, left=self.lasts)
        if any(
            abs(taken - ratio * predicted) > SLACK * ratio * predicted + _FEW_BYTES
            for (taken, predicted), ratio in zip(layers, self.ratios, strict=True)
        ):
            return replace(self, lasts=0, left=0)
        return replace(self, left=self.left - 1)

    def is_exceeded(self, layers: Sequence[tuple[float, float]]) -> bool:
        """Return whether an object far exceeds its prediction, so that another encoding may be smaller."""
        expected = sum(ratio * predicted for (_, predicted), ratio in zip(layers, self.ratios, strict=False))
        return bool(self.ratios) and sum(taken for taken, _ in layers) > (1 + EXCESS) * expected + _FEW_BYTES
