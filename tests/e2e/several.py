"""The name by which tests and benchmarks start :mod:`verl_adaptive.integration.selftest.several`.

python -m tests.e2e.several runs.json
"""

from __future__ import annotations

from verl_adaptive.integration.selftest.several import main

if __name__ == "__main__":
    main()
