"""For all tests and the processes that they start."""

from __future__ import annotations

import os

# Ray's own is 15: beside two busy test processes its workers would hardly run, and a start-up would take minutes.
os.environ.setdefault("RAY_worker_niceness", "0")
