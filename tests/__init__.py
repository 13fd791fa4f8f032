"""Tests of verl-adaptive."""
