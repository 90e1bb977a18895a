"""What an image may not hold: a task's solution, its tests, or a version of its project that has the fix."""

from __future__ import annotations

import io
import json
import py_compile
import tarfile
import zipfile
from pathlib import Path

from click.testing import CliRunner

from sandbox.environments.images.cache import ImageCache
from sandbox.environments.images.commands import image
from sandbox.environments.images.leaks import Leak, scan, secrets_of
from tests.sandbox.environments.images import layout, member, tar

FIXED = """def total(items):
    raise ValueError("negative totals are not allowed here")
    return balance_with_rounding(items, mode="half-even")
"""
PATCH = (
    "cat > p <<'E'\n--- a/shop/a.py\n+++ b/shop/a.py\n"
    + "".join(f"+{line}\n" for line in FIXED.splitlines()[1:])
    + " def total(items):\nE\n"
)
TEST = 'def test_total():\n    assert shop.total([1, 2, 3, 4]) == "six point zero zero"\n'


def task(place: Path) -> Path:
    found = place / "shop-1"
    for name, text in {
        "task.toml": "",
        "solution/solve.sh": PATCH,
        "tests/test_shop.py": TEST,
        "environment/workspace/shop/a.py": "def total(items):\n    pass\n",
        "environment/workspace/pyproject.toml": '[project]\nname = "Shop"\nversion = "1.0"\n',
    }.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(text)
    return found


def planted(layer: Path) -> Path:
    site = layer / "usr/lib/python3/site-packages"
    (site / "shop-2.0.dist-info").mkdir(parents=True)
    (site / "shop-1.0.dist-info").mkdir()
    (site / "shopping-3.0.dist-info").mkdir()
    (site / "shop.py").write_text(FIXED)
    py_compile.compile(str(site / "shop.py"), cfile=str(layer / "cache/shop.pyc"))
    with zipfile.ZipFile(layer / "cache/shop-2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("shop/a.py", FIXED)
    with tarfile.open(layer / "cache/shop-2.0.tar.gz", "w:gz") as archive:
        archive.addfile(*_as_member("shop-2.0/tests/test_shop.py", TEST.encode()))
    (layer / "cache/harmless.py").write_text("def total(items):\n    return sum(item.price for item in items)\n")
    (layer / "cache/broken.whl").write_bytes(b"PK\x03\x04 no archive")
    (layer / "cache/link").symlink_to("/etc/passwd")
    return layer


def _as_member(name: str, data: bytes) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info, data = member(name, data)
    return info, io.BytesIO(data)


def test_every_way_to_give_a_solution_away_is_found(tmp_path: Path) -> None:
    found = scan([planted(tmp_path / "layer")], secrets_of(task(tmp_path)))
    assert [(leak.kind, leak.path) for leak in found] == [
        ("solution", "/cache/shop-2.0-py3-none-any.whl"),
        ("solution", "/cache/shop.pyc"),
        ("solution", "/usr/lib/python3/site-packages/shop.py"),
        ("tests", "/cache/shop-2.0.tar.gz"),
        ("version", "/usr/lib/python3/site-packages/shop-2.0.dist-info"),
    ]
    assert found[-1].detail == "version 2.0 of the project is installed, the task has 1.0"


def test_what_the_agents_tree_holds_is_no_secret(tmp_path: Path) -> None:
    given = task(tmp_path)
    (given / "environment/workspace/old.py").write_text(FIXED)
    assert not secrets_of(given).solution
    assert {leak.kind for leak in scan([planted(tmp_path / "layer")], secrets_of(given))} == {"tests", "version"}


def test_an_image_is_read_once_per_task(tmp_path: Path) -> None:
    layout(tmp_path / "layout", [tar([member("opt/fix.py", FIXED.encode())])])
    cache, given = ImageCache(tmp_path / "data/images"), task(tmp_path)
    found = cache.add_layout(tmp_path / "layout", "example/shop:1")
    expected = [Leak("solution", "/opt/fix.py", "2 of 2 lines")]
    assert cache.leaks(found, given) == expected
    next((tmp_path / "data/images/layers").glob("*/opt/fix.py")).unlink()
    assert cache.leaks(found, given) == expected
    result = CliRunner().invoke(image, ["scan", "--data-dir", str(tmp_path / "data"), "--json", "example/shop:1", str(given)])
    assert result.exit_code == 1 and json.loads(result.output) == [{"task": "shop-1", **expected[0]._asdict()}]


def test_images_are_listed_and_pruned_by_command(tmp_path: Path) -> None:
    archive = tmp_path / "root.tar"
    archive.write_bytes(tar([member("etc/motd", b"x" * 10**6)]))
    where = ["--data-dir", str(tmp_path / "data"), "--json"]

    def rl(*arguments: str) -> dict[str, object]:
        result = CliRunner().invoke(image, [*arguments, *where])
        assert result.exit_code == 0, result.output
        found: dict[str, object] = json.loads(result.output)
        return found

    pulled = rl("pull", str(archive), "--name", "bare")
    assert (pulled["name"], pulled["layers"], pulled["mb"]) == ("bare", 1, 1.0)
    assert rl("list")["mb"] == 1.0
    assert rl("prune", "--keep-gb", "1") == {"removed": [], "mb": 0.0}
    assert rl("prune") == {"removed": [pulled["digest"]], "mb": 1.0}
