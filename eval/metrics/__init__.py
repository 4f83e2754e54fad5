"""Metrics as local `evaluate` modules, one folder each: they load from this folder, without the network."""
