from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from server.schemas.probes import ModelFacts, TemplateClass
from server.schemas.runspec import RunSpec
from trainer.checks.model import model_facts
from trainer.cli import main
from trainer.policies.tokenizer import bootstrap
from trainer.vocabulary import VISION, byte_level


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy's directory as far as the checks read it: no weights."""
    bootstrap().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 16, "max_position_embeddings": 512}))
    return tmp_path


def spec_for(path: Path | str, *, thinking: bool = False, renderer: str = "qwen3") -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"path": str(path), "thinking": thinking, "renderer": renderer},
            "harnesses": [{"name": "mini-swe-agent", "version": "2.4.6"}, {"name": "unrecorded", "version": "1"}],
            "data": {"family": "onebug"},
        }
    )


def test_a_sound_policy_is_append_only_and_its_calls_survive(policy: Path) -> None:
    facts = model_facts(spec_for(policy))
    assert (facts.problem, facts.template, facts.round_trip) == ("", TemplateClass.APPEND_ONLY, "")
    assert (facts.experts, facts.longest) == (16, 512)
    assert list(facts.prompt_tokens) == ["mini-swe-agent"]
    assert facts.prompt_tokens["mini-swe-agent"] > 1000  # nearly one id per byte: this tokenizer has no blocks


def test_a_multimodal_policy_keeps_its_language_model_in_a_part_of_its_configuration(policy: Path) -> None:
    inner = {"num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "max_position_embeddings": 262_144}
    (policy / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": inner}))
    facts = model_facts(spec_for(policy))
    assert (facts.experts, facts.top_k, facts.layers, facts.longest) == (256, 8, 40, 262_144)


@pytest.mark.parametrize("renderer", ["qwen3", "qwen3.5"])
def test_the_junction_between_turns_is_measured(tmp_path: Path, renderer: str) -> None:
    """User-pain 11: the newline behind a turn's end was missing, because nobody had sampled it."""
    tokenizer = byte_level(control=VISION)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    junction = model_facts(spec_for(tmp_path, renderer=renderer)).junction
    assert tokenizer.decode(junction, skip_special_tokens=False) == "\n<|im_start|>user\n"
    assert junction.count(tokenizer.token_to_id("<|im_start|>")) == 1


def test_a_template_that_drops_thinking_is_recognised(policy: Path) -> None:
    """User-pain 6: the check renders three turns and says what the template does to earlier ones."""
    assert model_facts(spec_for(policy, thinking=True)).template is TemplateClass.STRIPS


@pytest.mark.parametrize(("thinking", "template"), [(False, TemplateClass.APPEND_ONLY), (True, TemplateClass.STRIPS)])
def test_qwen35_writes_calls_as_markup_and_they_come_back_with_their_types(tmp_path: Path, thinking: bool, template: TemplateClass) -> None:
    byte_level(control=VISION).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    facts = model_facts(spec_for(tmp_path, thinking=thinking, renderer="qwen3.5"))
    assert (facts.problem, facts.template, facts.round_trip) == ("", template, "")


def test_a_tokenizer_of_the_other_family_is_said(policy: Path) -> None:
    assert model_facts(spec_for(policy, renderer="qwen3.5")).problem.startswith("the tokenizer does not fit the qwen3.5 renderer")


def test_a_broken_policy_is_a_fact_and_not_a_crash(policy: Path) -> None:
    assert "no policy 'builtin:nope' ships" in model_facts(spec_for("builtin:nope")).problem
    assert model_facts(spec_for(policy / "nope")).problem == f"{policy}/nope/config.json is missing"
    tokenizer = (policy / "tokenizer.json").read_text()
    (policy / "tokenizer.json").write_text(tokenizer.replace("<tool_call>", "<other>"))
    assert model_facts(spec_for(policy)).problem.startswith("the tokenizer does not fit the qwen3 renderer")
    (policy / "tokenizer.json").write_text("{}")
    assert model_facts(spec_for(policy)).problem
    (policy / "config.json").write_text("{")
    assert model_facts(spec_for(policy)).problem


def test_the_command_answers_one_json_document(policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(spec_for(policy).model_dump_json())
    answer = CliRunner().invoke(main, ["check-model", "--spec", str(file), "--json"])
    assert ModelFacts.model_validate_json(answer.output).template is TemplateClass.APPEND_ONLY
