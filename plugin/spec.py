"""From what a user names (a preset or a YAML file, and overrides) to the request that the control plane understands."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from server.schemas.api import SpecRequest

from .errors import ControlError

DEFAULT = "local"


def spec_request(source: str, overrides: dict[str, Any], base: Path) -> SpecRequest:
    """`source` is a file when it looks like a path (a suffix or a separator), else the name of a preset.

    Paths are relative to `base`. Raises ControlError when the file cannot be read as a YAML mapping.
    """
    if not ("/" in source or source.endswith((".yaml", ".yml", ".json"))):
        return _request(f"--set of {source}", {"extends": source}, overrides, str(base) if overrides else "")
    path = base / Path(source).expanduser()
    if path.exists() and not path.is_file():
        raise ControlError(f"{path} is not a file: name a YAML file, or a preset such as {DEFAULT}")
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ControlError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ControlError(f"{path} is not a text file; a run is described in YAML") from None
    except yaml.YAMLError as error:
        raise ControlError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ControlError(f"{path} must hold a mapping of RunSpec fields, for example `extends: {DEFAULT}`")
    return _request(str(path), document, overrides, str(path.parent.resolve()))


def _request(what: str, document: dict[str, Any], overrides: dict[str, Any], base: str) -> SpecRequest:
    try:
        request = SpecRequest(document=document, overrides=overrides, base=base)
        request.model_dump_json()
    except ValueError:  # keys that are no text, bytes, half characters, anchors that hold themselves
        raise ControlError(
            f"{what} holds more than text, numbers, lists and mappings with names: see docs/runs.md for the fields"
        ) from None
    return request


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """`field.path=value` pairs; the value is read as YAML, so `12` is a number. Raises ControlError."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        field, equals, value = pair.partition("=")
        if not equals or not field:
            raise ControlError(f"--set {pair!r} is not FIELD=VALUE, for example --set trainer.steps=12")
        try:
            overrides[field] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ControlError(f"--set {field}: {value!r} is not a YAML value; quote it") from None
    return overrides
