"""Plans of `gc`: for the changes alone, to compare with plans for the whole store."""

from __future__ import annotations

from contextlib import suppress

import ckstore
from ckstore.errors import CkstoreError
from ckstore.gc.changed import changes
from ckstore.gc.plan import GcPlan


def decisions(plan: GcPlan) -> dict[str, object]:
    """Return the effects of a plan."""
    found = plan.survey
    return {
        "removed": sorted(pack.name for pack in plan.removed),
        "rewritten": sorted(
            (pack.name, sorted(pack.slots), sorted(pack.wanted), pack.is_present) for pack in plan.rewritten
        ),
        "files": sorted(info.name for info in plan.files),
        "dead": sorted(found.dead),
        "in full": sorted((name, sorted(slots)) for name, slots in found.in_full.items()),
        "lost": sorted(plan.lost),
        "expired": plan.expired,
    }  # fmt: skip


def of_changes(store: ckstore.Store, grace: float | None) -> GcPlan | None:
    """Return the plan that looks at the changes alone; None if the whole store has to be looked at."""
    changed = changes(store._repository)
    if changed is None:
        return None
    with suppress(CkstoreError):
        return GcPlan(store._repository, grace, changed=changed)
    return None
