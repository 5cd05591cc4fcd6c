"""The objects to store in full: fewest bytes, compared with all choices; nothing is written for little."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckstore.lineage.release import Layer, to_store_in_full

#: An object is stored against an earlier one, or in full.
LAYERS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9), st.none() | st.integers(1, 20), st.booleans()),
    min_size=1,
    max_size=8,
)


def taken(layers: dict[int, Layer], wanted: set[int], full: set[int], price: float = 1.0) -> float | None:
    """Return the bytes of a choice; None if it stores something in full that cannot be, or that nothing needs."""
    needed = set()
    for key in wanted:
        place: int | None = key
        while place is not None:
            needed.add(place)
            place = None if place in full else layers[place].base
    if any(layers[key].alone is None or layers[key].base is None for key in full) or not full <= needed:
        return None
    return sum(price * (layers[key].alone or 0) if key in full else layers[key].stored for key in needed)


@given(LAYERS, st.sampled_from([1.0, 1.5]))
def test_the_choice_takes_the_fewest_bytes_of_all(drawn: list[tuple[int, int, int | None, bool]], price: float) -> None:
    layers = {
        key: Layer(None if base >= key else base, stored, alone) for key, (base, stored, alone, _) in enumerate(drawn)
    }
    wanted = {key for key, (*_, is_wanted) in enumerate(drawn) if is_wanted}
    every = (
        {key for key, is_in in enumerate(chosen) if is_in} for chosen in product([False, True], repeat=len(layers))
    )
    least = min(size for full in every if (size := taken(layers, wanted, full, price)) is not None)
    assert taken(layers, wanted, to_store_in_full(layers, wanted, price), price) == least


def test_nothing_is_written_where_it_saves_little() -> None:
    layers = {0: Layer(None, 100, 100), 1: Layer(0, 5, 100)}
    assert to_store_in_full(layers, {1}, 1.0) == {1}
    assert to_store_in_full(layers, {1}, 1.1) == set()
    assert to_store_in_full(layers, {0, 1}, 1.0) == set()
