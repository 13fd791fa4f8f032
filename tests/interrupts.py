"""Ctrl-C for programs that tests start."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """For ``preexec_fn``: a background job of a shell ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
