"""Measurements of routing replay by itself."""
