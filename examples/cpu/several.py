"""Several training runs, one after the other, on one start-up of verl: ``python -m examples.cpu.several runs.json``.

The code is :mod:`verl_adaptive.integration.selftest.several`.
"""

from __future__ import annotations

from verl_adaptive.integration.selftest.several import Several, main

__all__ = ["Several", "main"]

if __name__ == "__main__":
    main()
