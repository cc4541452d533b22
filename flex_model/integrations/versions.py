"""The versions of torch and transformers that are tested, and the warning for newer ones."""

from __future__ import annotations

import sys
import warnings

#: The oldest and the newest version that the tests run on: docs/versions.md.
TESTED = {"torch": ("2.11.0", "2.15.0"), "transformers": ("5.17.0", "5.24.0")}
_warned: set[str] = set()


def warn_if_newer() -> None:
    """Warn once, by name, of a package that is imported in a newer version than those tested. What
    depends on a private name that is gone there refuses: ``torch_private``,
    ``transformers_private``.
    """
    for package, (_, newest) in TESTED.items():
        version = getattr(sys.modules.get(package), "__version__", newest)
        if package not in _warned and _minor(version) > _minor(newest):
            _warned.add(package)
            warnings.warn(
                f"flex_model was tested with {package} up to {newest}, and {version} is installed. "
                "A layout that it does not know there is an error, not a wrong number; see "
                f"docs/versions.md, or install {package}<={newest}",
                stacklevel=3,
            )


def _minor(version: str) -> tuple[int, ...]:
    """Return a version's first two numbers: patch releases change no names."""
    numbers = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, number)) or 0) for number in numbers)
