"""Merging as pure functions of states."""

from llm_fed.merge.mean import mean

__all__ = ["mean"]
