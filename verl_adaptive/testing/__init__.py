"""Conformance suites for parts and stores, to be imported by the tests of whoever writes one."""

import pytest

pytest.register_assert_rewrite(
    *(f"{__name__}.{suite}" for suite in ("advantages", "allocators", "filters", "samplers"))
)
