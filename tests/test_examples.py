"""Every shipped document is a valid RunSpec."""

from pathlib import Path

import pytest
import yaml

from server.spec import resolve

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "server" / "presets").glob("*.yaml")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_it_resolves(path: Path) -> None:
    spec = resolve(yaml.safe_load(path.read_text()), {}).spec
    assert spec.trainer.steps >= 1 and spec.harnesses


def test_the_documents_are_found() -> None:
    assert len(DOCUMENTS) >= 4
