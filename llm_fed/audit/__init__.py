"""Audits a finished or unfinished run: what it has kept, and rounds of it that are trained again."""
