"""Compiles kernels in a process of its own, while another one needs them: together they take half the time.

Both keep what they have compiled where the other one looks first. An ingest begins with what estimates and codes, so
this process begins with what decodes.
"""

from __future__ import annotations

import numpy as np

#: Seven integers, without and with classes, as `encode_integers` has written them since format 1.
_PLAIN = bytes.fromhex("010224facd7901073e97ec86b4")
_GROUPED = bytes.fromhex("0112f2ee73680107bb33e99a7d0f9b2b32a1d7c012")
_CLASSES = np.array([0, 1, 0, 1, 0, 1, 0], np.uint8)


def main() -> None:
    """Compile what versions of float32 weights with Adam's moments take."""
    from ckstore.codecs.integers import decode_integers, encode_integers, payload_bits
    from ckstore.codecs.lattice import LinearLattice, ordinal_classes, ordinal_correct, ordinal_difference, scaled
    from ckstore.codecs.rounded import RoundedLattice

    integers = np.empty(7, np.int32)
    decode_integers(_PLAIN, integers)
    decode_integers(_GROUPED, integers, _CLASSES)
    lattice, finer = LinearLattice("float32", -4, 7), LinearLattice("float32", -5, 7)
    bits = lattice.values(integers, 0)
    predicted, _ = lattice.own(integers, 0)
    ordinal_correct(predicted, integers, "float32")
    lattice.chained(bits, finer.project(lattice, integers, 0), 0)
    scaled(bits, "float32", 0.5)
    RoundedLattice("float32", 24, 0, 7).values(integers, 0)
    lattice.quantise(bits, 0, integers)
    ordinal_difference(bits, predicted, "float32")
    classes = ordinal_classes(bits, "float32")
    encode_integers(integers, classes)
    payload_bits(integers)


if __name__ == "__main__":
    main()
