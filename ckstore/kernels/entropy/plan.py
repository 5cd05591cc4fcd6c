"""The encoder's plan: kind, plane, bins and code lengths of every group, by measured cost: `plan.c`.

Its functions take the addresses of a directory and of an encoder's arrays, and the number of groups; `kernels.h` has
the order of the steps.
"""

from __future__ import annotations

from ckstore.kernels.native import function

CELLS = 1 << 16
"""The maximal number of cells of a histogram."""

choose_planes = function("choose_planes", "pip")
"""Choose the planes of dense groups; return the bytes of all planes."""

plan_dense = function("plan_dense", "pip")
"""Plan dense groups; return the number of groups whose pairs are to be extracted."""

plan_pairs = function("plan_pairs", "pip")
"""Plan the groups whose pairs are extracted."""

stream_room = function("stream_room", "pi")
"""Return the bytes that one stream may need."""

directory_room = function("directory_room", "pi")
"""Return the bytes that the directory may need."""
