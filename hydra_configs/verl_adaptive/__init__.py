"""Hydra's root for the ``adaptive`` config group; YAML only."""
