"""Inspection of hooked models: layouts, dry runs on shapes, costs of a run, verification against
the unsharded model.
"""

from flex_model.distributed.costs import Cost
from flex_model.inspection import tree
from flex_model.inspection.dry_run import DryRun, DryRunRow
from flex_model.inspection.edit_checks import Finding
from flex_model.inspection.hook_tables import Explanation, HookCost, Layouts, SiteLayout
from flex_model.inspection.verify import SiteDifference, VerifyReport

__all__ = [
    "Cost",
    "DryRun",
    "DryRunRow",
    "Explanation",
    "Finding",
    "HookCost",
    "Layouts",
    "SiteDifference",
    "SiteLayout",
    "VerifyReport",
    "tree",
]
