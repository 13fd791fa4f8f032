"""Hydra looks for plugins in every package below ``hydra_plugins``; this one makes ``+adaptive=...`` known."""
