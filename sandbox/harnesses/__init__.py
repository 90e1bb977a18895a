"""Adapters of coding harnesses, by name. Each launches a pinned, unmodified runtime that the sandbox mounts read-only."""

from __future__ import annotations
