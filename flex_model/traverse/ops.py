"""Release 0.1.0's import path of ``flatten`` and ``unflatten``."""

from flex_model.traverse import flatten, unflatten  # noqa: F401
