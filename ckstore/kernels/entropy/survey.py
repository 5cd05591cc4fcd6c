"""The encoder's input from elements in coded order: facts about groups, numbers to be coded, zero runs: `survey.c`."""

from __future__ import annotations

from ckstore.kernels.native import Array, check, function

_survey_groups = function("survey_groups", "ppip")
_take_numbers = function("take_numbers", "ppipp")
_extract_pairs = function("extract_pairs", "ppip")


def survey_groups(coded: Array, directory: int, number: int, encoder: int) -> int:
    """Fill `pairs` (the non-zeros), `top`, `kind` and `paired` of the first `number` groups, by their place and size.

    `directory` and `encoder` are addresses. Returns the bits of the largest element without its sign.
    """
    return check(_survey_groups(id(coded), directory, number, encoder))


def take_numbers(coded: Array, directory: int, number: int, encoder: int, planes: Array) -> None:
    """Split the elements of dense groups: planes one after the other into `planes` (uint8), other bits elsewhere."""
    check(_take_numbers(id(coded), directory, number, encoder, id(planes)))


def extract_pairs(coded: Array, directory: int, number: int, encoder: int) -> None:
    """Write the zero run before every non-zero, and its value, of the groups that are `paired`."""
    check(_extract_pairs(id(coded), directory, number, encoder))
