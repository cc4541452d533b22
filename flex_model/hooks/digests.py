"""The digests by which ranks compare their hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header, site_hash, sites_hash
from flex_model.hooks.table import HookTable
from flex_model.layouts.statements import Statements


class HookDigests:
    """Digests of the hooks that are registered on this rank, and of those active in a run.

    Args:
        settings: Settings of the FlexModel that must be equal on all ranks, too.

    Attributes:
        has_hooks: Whether any hook is registered, on this rank's model or for other ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        table: HookTable,
        statements: Statements,
        settings: Mapping[str, Any],
    ) -> None:
        self._communicator, self._table = communicator, table
        self._statements, self._settings = statements, dict(settings)
        self._num_published, self._agreed = 0, site_hash()
        self._checked: str | None = None  # the digest of the statements, until hooks change
        self._has_new = False

    @property
    def has_hooks(self) -> bool:
        return self._num_published > 0

    def take_new(self) -> bool:
        """Return whether hooks were registered or removed since the last call of this."""
        has_new, self._has_new = self._has_new, False
        return has_new

    def set(self, name: str, value: Any) -> None:
        """Compare a setting that has changed with that of all ranks at the next check. Local."""
        self._settings[name], self._checked = value, None

    def hooks_changed(self) -> None:
        """Publish the registered hooks to the other ranks, whether or not this rank runs the model.
        Local.
        """
        registrations = self._table.registrations
        if len(registrations) == self._num_published:
            return
        self._num_published, self._has_new, self._checked = len(registrations), True, None
        if self._communicator.is_local:
            return
        sites = [registration.site for registration in registrations]
        self._communicator.publish_hooks(f"{site_hash(*sites):x}" if sites else "")

    def check(self) -> None:
        """Compare the registered hooks, the settings and the statements with those of all ranks.
        Collective where they are new.

        Raises:
            HookMismatchError: ranks differ.
        """
        if self._checked == self._statements.digest:
            return
        active, registrations = self._table.active_hooks, self._table.registrations
        digest = site_hash(
            sites_hash(*(registration.site for registration in registrations)),
            *self._settings.values(),
            self._statements.digest,
        )
        if digest == self._agreed:  # hooks may have come and gone, on this rank only
            self._checked = self._statements.digest
            return
        names = "; ".join(
            f"{registration.kind} {registration.hook_function!r}" for registration in registrations
        )
        settings = ", ".join(f"{name} {value!r}" for name, value in self._settings.items())
        self._communicator.check_consistency(
            Header("registered hooks", site=site_hash(digest, active.digest)),
            f"the start of a run of {active.choice} ({settings}) with these hooks: {names}",
        )
        self._communicator.agree_hooks()
        self._agreed, self._checked = digest, self._statements.digest

    def described(self, only_active: bool = False) -> list[Any]:
        """Describe what records depend on, as JSON."""
        return [
            {
                "kind": r.kind,
                "module": r.name,
                "tensor": r.hook_function.unpack_idx,
                "record": r.hook_function.record_name if r.hook_function.record else None,
                "edits": r.edits,
                "select": None if r.select is None else repr(r.select),
                "dims": [] if r.select is None else r.select.dims,
            }
            for r in self._table.registrations
            if (r.edits or r.hook_function.record)
            and (not only_active or r.index in self._table.active)
        ]
