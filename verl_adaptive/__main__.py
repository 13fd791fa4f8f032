"""``python -m verl_adaptive COMMAND`` is ``verl-adaptive COMMAND``."""

from __future__ import annotations

import sys

from verl_adaptive.cli import main

sys.exit(main())
