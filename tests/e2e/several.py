"""The name by which tests and benchmarks start :mod:`examples.cpu.several`.

python -m tests.e2e.several runs.json
"""

from __future__ import annotations

from examples.cpu.several import main

if __name__ == "__main__":
    main()
