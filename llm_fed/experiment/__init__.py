"""Builds what a configuration names, and runs it from start to export."""
