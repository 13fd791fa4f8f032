"""Allocators: how many rollouts a prompt gets; one small file a method."""
