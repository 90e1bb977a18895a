"""What an image's tree may bring with it to the runner's machine."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from sandbox.environments.docker.fetch import _kept


def hard_link(name: str, to: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.LNKTYPE, to
    return member


@pytest.mark.parametrize("to", ["../secret", "../../etc/passwd", "down/../../secret", "away/secret"])
def test_no_second_name_is_given_to_a_file_outside(tmp_path: Path, to: str) -> None:
    target = tmp_path / "tree"
    target.mkdir()
    (target / "away").symlink_to(tmp_path)
    with pytest.raises(tarfile.OutsideDestinationError):
        _kept(hard_link("mine", to), str(target))


def test_a_second_name_within_the_tree_stays(tmp_path: Path) -> None:
    assert _kept(hard_link("b", "a"), str(tmp_path)).linkname == "a"
