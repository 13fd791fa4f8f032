"""Conformance suites for parts and stores, to be imported by the tests of whoever writes one."""
