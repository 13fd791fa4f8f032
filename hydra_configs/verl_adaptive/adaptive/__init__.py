"""Presets; the folders below hold the parts they are made of."""
