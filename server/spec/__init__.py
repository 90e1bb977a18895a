"""From layers of YAML to one RunSpec whose every value knows where it came from."""

from .layers import Layer, SpecError, preset_names
from .resolve import Resolved, resolve

__all__ = ["Layer", "Resolved", "SpecError", "preset_names", "resolve"]
