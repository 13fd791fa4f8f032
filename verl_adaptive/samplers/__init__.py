"""Samplers: which prompts are rolled out next; one small file a method."""
