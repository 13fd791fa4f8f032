"""Advantages: baseline and scale of a group's advantages; one small file a method."""
