"""Filters: which groups and rollouts train; one small file a method."""
