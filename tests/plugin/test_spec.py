from pathlib import Path

import pytest

from plugin.errors import ControlError
from plugin.spec import parse_overrides, spec_request


def test_a_bare_word_is_a_preset() -> None:
    assert spec_request("local", {}, Path("/anywhere")).document == {"extends": "local"}


def test_a_path_is_a_file_and_its_directory_the_base(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.yaml").write_text("extends: local\ntrainer: {steps: 3}\n")
    request = spec_request("sub/run.yaml", {"trainer.seed": 1}, tmp_path)
    assert request.document == {"extends": "local", "trainer": {"steps": 3}}
    assert request.base == str(tmp_path / "sub")
    assert request.overrides == {"trainer.seed": 1}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "must hold a mapping"),
        ("", "must hold a mapping"),
        (b"\xff\xfe\x00", "not a text file"),
        ("1: 2", "mappings with names"),
        ("x: !!binary /////w==", "more than text"),
        ("a: &a [*a]", "more than text"),
        ('a: "\\ud800"', "more than text"),
    ],
)
def test_a_file_that_is_no_spec_is_refused_in_one_line(tmp_path: Path, content: str | bytes, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ControlError, match=words) as error:
        spec_request("run.yaml", {}, tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match=r"cannot read .*absent\.yaml: No such file"):
        spec_request("absent.yaml", {}, tmp_path)


@pytest.mark.parametrize("name", ["a.directory/", "/dev/zero"])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.directory").mkdir()
    with pytest.raises(ControlError, match="is not a file"):
        spec_request(name, {}, tmp_path)


def test_overrides_are_yaml_values() -> None:
    assert parse_overrides(["trainer.steps=3", "reporting.name=my run", "algorithm.routing_replay=false"]) == {
        "trainer.steps": 3,
        "reporting.name": "my run",
        "algorithm.routing_replay": False,
    }


@pytest.mark.parametrize("pair", ["trainer.steps", "=3", "a=[1"])
def test_a_malformed_override_is_refused(pair: str) -> None:
    with pytest.raises(ControlError, match="--set"):
        parse_overrides([pair])
