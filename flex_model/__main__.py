"""``python -m flex_model``: see ``flex_model.cli``."""

from flex_model.cli import main

raise SystemExit(main())
