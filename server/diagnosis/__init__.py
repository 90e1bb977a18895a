"""Findings come from deterministic detectors with their evidence rows; a language model may only rank and explain them."""
