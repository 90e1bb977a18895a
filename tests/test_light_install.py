"""The light install stays light: what the control plane and the plugin need must not lead to torch, verl, ray or Harbor."""

import subprocess
import sys

import pytest

HEAVY = {"numpy", "torch", "verl", "ray", "transformers", "harbor", "litellm", "vllm", "tensordict"}

PROBE = """
import importlib, pkgutil, sys
for room in ("server", "plugin"):
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        if not module.name.endswith("__main__") and ".migrations" not in module.name:
            importlib.import_module(module.name)
print(",".join(sorted(name for name in sys.modules if "." not in name)))
"""


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """What is loaded when every module of server and plugin is."""
    return set(subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True).stdout.strip().split(","))


def test_server_and_plugin_import_nothing_heavy(imported: set[str]) -> None:
    assert imported & HEAVY == set()


def test_rooms_do_not_import_each_other(imported: set[str]) -> None:
    assert "server" in imported and "plugin" in imported
    assert imported & {"trainer", "sandbox"} == set()


def test_locked_light_requirements_hold_nothing_heavy() -> None:
    import tomllib
    from pathlib import Path

    lock = tomllib.loads((Path(__file__).parents[1] / "uv.lock").read_text())
    packages: dict[str, list[dict[str, object]]] = {}
    for package in lock["package"]:
        packages.setdefault(package["name"], []).append(package)
    reached, todo = set(), ["lego-rl"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += [dependency["name"] for package in packages[name] for dependency in package.get("dependencies", [])]  # type: ignore[attr-defined]
    assert reached & (HEAVY - {"vllm"}) == set()
