from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from server.schemas.datadir import DataDir
from server.schemas.probes import TRAINED_WITH, TrainedWith
from server.schemas.rundir import BestFile, RunDir, RunFile, write_atomic
from server.schemas.runspec import Data, Harness, Model, Reporting, RunSpec
from server.schemas.trials import Budgets
from trainer.checkpoints.changed import changes, learning_side
from trainer.checkpoints.command import checkpoint
from trainer.checkpoints.export import Checkpoint, ExportError, export
from trainer.checkpoints.kept import forget_after, is_best, kept, name_best, prune, weights
from trainer.checkpoints.serve import serve_line

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3).to(torch.bfloat16),
    "model.norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "lm_head.weight": torch.zeros(4, 3, dtype=torch.bfloat16),
}


def save(directory: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"} | config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = save(tmp_path / "base", TENSORS)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "pytorch_model.bin").write_text("old")
    return base


def trained(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in TENSORS.items()} | changes


def test_an_export_has_the_bases_files_layout_and_types(tmp_path: Path, base: Path) -> None:
    moved = torch.tensor([1.0, 2.0, 3.0000001])
    done = export(save(tmp_path / "run", trained(**{"model.norm.weight": moved})), base, tmp_path / "out")
    assert (done.tensors, done.changed) == (3, 1)
    assert sorted(path.name for path in done.directory.iterdir()) == ["chat_template.jinja", "config.json", "model.safetensors"]
    made = load_file(done.directory / "model.safetensors")
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    assert torch.equal(made["model.norm.weight"], moved.to(torch.bfloat16))


def test_shards_stay_as_the_base_has_them(tmp_path: Path, base: Path) -> None:
    (base / "model.safetensors").unlink()
    places = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        places[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, base / places[name])
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    done = export(save(tmp_path / "run", trained()), base, tmp_path / "out")
    assert Checkpoint(done.directory).places == places and done.changed == 0


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({name: t for name, t in trained().items() if name != "model.norm.weight"}, "lacks model.norm.weight"),
        (trained(extra=torch.zeros(1)), "has besides extra"),
        (trained(**{"model.norm.weight": torch.ones(4)}), r"has in another shape model.norm.weight \(4,\) for \(3,\)"),
        (trained(**{"model.norm.weight": torch.tensor([1.0, float("nan"), 1.0])}), "model.norm.weight holds values that are not finite"),
        (trained(**{"model.norm.weight": torch.tensor([1.0, 3.4e38, 1.0])}), "not finite in the base's torch.bfloat16"),
        (
            {f"base.{name}": t for name, t in trained().items()},
            "lacks lm_head.weight, model.embed_tokens.weight, model.norm.weight; it has",
        ),
    ],
)
def test_what_does_not_fit_the_base_is_not_exported(tmp_path: Path, base: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(save(tmp_path / "run", tensors), base, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"], "nothing half made stays"


def test_a_tied_output_layer_may_be_left_out(tmp_path: Path) -> None:
    tied = TENSORS | {"lm_head.weight": TENSORS["model.embed_tokens.weight"].clone()}
    base = save(tmp_path / "base", tied, tie_word_embeddings=True)
    without = {name: tensor.float() for name, tensor in tied.items() if name != "lm_head.weight"}
    moved = without | {"model.embed_tokens.weight": without["model.embed_tokens.weight"] + 1}
    done = export(save(tmp_path / "run", moved), base, tmp_path / "out")
    made = load_file(done.directory / "model.safetensors")
    assert torch.equal(made["lm_head.weight"], made["model.embed_tokens.weight"]) and done.changed == 2


def test_a_text_model_of_a_multimodal_base_gets_what_training_left_out(tmp_path: Path) -> None:
    """Qwen3.5's draft layers and vision tower are not loaded, so not saved; its names have `language_model` in them."""
    text = {name.replace("model.", "model.language_model."): tensor for name, tensor in TENSORS.items()}
    text |= {"lm_head.weight": text["model.language_model.embed_tokens.weight"].clone()}
    parts = {"mtp.fc.weight": torch.full((2, 2), 3.0), "model.visual.a": torch.ones(2), "model.visual.b": torch.ones(2)}
    base = save(tmp_path / "base", text | parts, text_config={"tie_word_embeddings": True})
    run = {name: tensor.float() + 1 for name, tensor in text.items() if name != "lm_head.weight"}
    done = export(save(tmp_path / "run", run), base, tmp_path / "out")
    made = load_file(done.directory / "model.safetensors")
    assert made.keys() == text.keys() | parts.keys() and done.changed == 3
    assert all(torch.equal(made[name], tensor) for name, tensor in parts.items())
    assert torch.equal(made["lm_head.weight"], made["model.language_model.embed_tokens.weight"])
    with pytest.raises(ExportError, match=r"it lacks model.visual.b$"):
        export(save(tmp_path / "half", run | {"model.visual.a": torch.ones(2)}), base, tmp_path / "out2")


def test_shards_that_are_not_what_the_index_says_are_said(tmp_path: Path, base: Path) -> None:
    run = save(tmp_path / "run", trained())
    places = dict.fromkeys([*TENSORS, "model.layers.0.weight"], "model.safetensors")
    (run / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ExportError, match=r"run lacks model.layers.0.weight, which its index names"):
        export(run, base, tmp_path / "out")
    (run / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ExportError, match=r"model.safetensors is no readable shard"):
        export(run, base, tmp_path / "out")
    (run / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ExportError, match="names a shard outside of its directory"):
        export(run, base, tmp_path / "out")


def test_a_cut_file_and_a_directory_that_is_there_are_said(tmp_path: Path, base: Path) -> None:
    run = save(tmp_path / "run", trained())
    with pytest.raises(ExportError, match="exists: give a directory that does not"):
        export(run, base, base)
    (run / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes()[:100])
    with pytest.raises(ExportError, match="holds no readable safetensors checkpoint"):
        export(run, base, tmp_path / "out")


@pytest.fixture
def run(tmp_path: Path, base: Path) -> RunDir:
    """Steps 1 to 4; the second is the best, the fourth the last."""
    run = RunDir(DataDir(tmp_path / "data").runs / "r1")
    for step in range(1, 5):
        made = save(weights(run, step), trained(**{"model.norm.weight": torch.full((3,), float(step))}))
        as_trained = TrainedWith(renderer="qwen3", thinking=False, history="keep", harnesses=["mini"], run_id="r1", step=step)
        (made / TRAINED_WITH).write_text(as_trained.model_dump_json())
    (run.checkpoints / "final").symlink_to(weights(run, 4).relative_to(run.checkpoints))
    name_best(run, BestFile(step=2, resolved=7, total=10))
    spec = RunSpec(model=Model(path=str(base), context=777), harnesses=[Harness(name="mini", version="1")], data=Data(family="onebug"))
    file = RunFile(run_id="r1", server_url="", event_token="", runner_token="", runtimes=tmp_path, spec=spec)
    write_atomic(run.run_file, file.model_dump_json())
    return run


def test_the_best_checkpoint_outlives_the_newest(run: RunDir) -> None:
    prune(run, keep=1)
    assert [(one.step, one.names) for one in kept(run)] == [(2, ("best",)), (4, ("final",))]
    assert is_best(run, 15, 20) and not is_best(run, 14, 20), "the earlier of two equal ones stays"


def test_weights_that_were_being_written_are_not_listed(run: RunDir) -> None:
    """The name of the run stands in them when verl has written the rest."""
    (weights(run, 3) / TRAINED_WITH).unlink()
    assert [one.step for one in kept(run)] == [1, 2, 4]


def test_a_best_step_that_is_done_again_is_forgotten(run: RunDir) -> None:
    forget_after(run, 2)
    assert [(one.step, one.names) for one in kept(run)] == [(1, ()), (2, ("best",))]
    (run.checkpoints / "global_step_2" / "actor").rename(run.checkpoints / "global_step_2" / "half")
    forget_after(run, 1)
    assert [path.name for path in run.checkpoints.glob("global_step_*")] == ["global_step_1"], "what was saved in part is gone too"
    assert is_best(run, 0, 10)


def test_what_was_changed_since_a_checkpoint_is_said_field_by_field(run: RunDir) -> None:
    spec = run.load().spec
    before = learning_side(spec)
    assert changes(before, spec) == changes({}, spec) == []
    algorithm = spec.algorithm.model_copy(update={"clip_low": 0.5})
    harness = spec.harnesses[0].model_copy(update={"version": "2"})
    sandbox = spec.sandbox.model_copy(update={"budgets": Budgets(agent_s=50)})
    changed = spec.model_copy(
        update={"algorithm": algorithm, "harnesses": [harness], "sandbox": sandbox, "reporting": Reporting(name="other")}
    )
    first, *rest = changes(before, changed)
    assert first.startswith("harnesses: ")
    assert rest == ["sandbox.budgets.agent_s: 300.0 → 50.0", "algorithm.clip_low: 0.0003 → 0.5"]


def test_a_best_file_of_another_kind_is_written_anew(run: RunDir) -> None:
    run.best_checkpoint.write_text("{")
    assert is_best(run, 0, 10)


def test_the_command_exports_the_best_and_says_how_to_serve_it(tmp_path: Path, run: RunDir) -> None:
    where = ["--data-dir", str(tmp_path / "data")]
    answer = CliRunner().invoke(checkpoint, ["export", "r1", "--to", str(tmp_path / "out"), "--json", *where])
    assert answer.exit_code == 0, answer.output
    said = json.loads(answer.output)
    assert (said["step"], said["tensors"], said["changed"]) == (2, 3, 1)
    assert said["serve"].startswith(f"vllm serve {tmp_path / 'out'} --host 127.0.0.1 --max-model-len 777 --enable-auto-tool-choice")
    assert json.loads((tmp_path / "out" / TRAINED_WITH).read_text())["step"] == 2
    listed = CliRunner().invoke(checkpoint, ["list", "r1", *where]).output.splitlines()
    assert [line.split()[:3] for line in listed][1] == ["step", "2", "best"]


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path, run: RunDir) -> None:
    where = ["--to", str(tmp_path / "out"), "--data-dir", str(tmp_path / "data")]
    answer = CliRunner().invoke(checkpoint, ["export", "r1", "--which", "9", *where])
    assert "run r1 has no checkpoint '9'; it has: 1, 2/best, 3, 4/final" in answer.output
    assert "there is no run ../r1" in CliRunner().invoke(checkpoint, ["export", "../r1", *where]).output
    shutil.rmtree(run.checkpoints)
    assert "it has: none" in CliRunner().invoke(checkpoint, ["export", "r1", *where]).output


@pytest.mark.parametrize(
    ("renderer", "thinking", "words"),
    [
        ("qwen3", True, "--tool-call-parser hermes --reasoning-parser qwen3"),
        ("qwen3.5", False, "--tool-call-parser qwen3_coder --default-chat-template-kwargs '{\"enable_thinking\": false}'"),
    ],
)
def test_the_serve_line_has_the_parsers_of_the_family(renderer: str, thinking: bool, words: str) -> None:
    as_trained = TrainedWith(renderer=renderer, thinking=thinking, history="keep", harnesses=[], run_id="", step=1)
    assert serve_line(Path("/m"), as_trained, 9).endswith(words)
