"""Output of a finished run: a verified checkpoint, metrics and the model card."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tunekit.checkpoint import final_checkpoint

RUN = ("run", "sft", "sft.yaml")
LORA = (*RUN, "adapter={kind: lora, rank: 4}")


def corrupt_saved_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negate one tensor in every checkpoint that is saved from now on."""
    write = final_checkpoint.save_final

    def final(adapter, folder, model, source, dist):
        write(adapter, folder, model, source)
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        name = next(name for name in tensors if "v_proj" in name and "lora_B" not in name)
        save_file(tensors | {name: -tensors[name]}, file, metadata={"format": "pt"})

    monkeypatch.setattr(final_checkpoint, "save_final", final)


@pytest.mark.parametrize("args", [RUN, LORA], ids=["full", "lora"])
def test_result_is_verified_and_has_a_card(workspace, args):
    result = workspace.run_tune(*args)
    assert result.code == 0
    assert "verified: " in result.err
    final = workspace.folder / "out/final"
    assert {"README.md", "curves.png", "verification.json", "tokenizer.json"} <= {path.name for path in final.iterdir()}
    verification = json.loads((final / "verification.json").read_text())
    assert verification["passed"] is True
    last = workspace.deterministic_metrics("out")[-1]
    assert last == {
        "step": 6,
        "verify/max_logit_diff": verification["largest"],
        "verify/mean_logit_diff": verification["mean"],
        "verify/top1_agreement": verification["top1"],
    }


@pytest.mark.parametrize("args", [RUN, LORA], ids=["full", "lora"])
def test_failed_verification_is_an_error_and_keeps_the_files(workspace, args, monkeypatch):
    corrupt_saved_weights(monkeypatch)
    result = workspace.run_tune(*args)
    final = workspace.folder / "out/final"
    assert result.code == 2
    line = result.err.splitlines()[-1]
    assert line.startswith("error: out/final: verification failed")
    assert "verification.json" in line
    assert "push" in line
    assert (final / "complete").is_file(), "files are kept for inspection"
    assert json.loads((final / "verification.json").read_text())["passed"] is False
    assert "**failed**" in (final / "README.md").read_text()
    assert workspace.deterministic_metrics("out")[-1]["verify/max_logit_diff"] > 0
    second = workspace.run_tune(*args)
    assert second.code == 2, "the error is repeated"
    assert second.err.splitlines()[-1] == line


def test_run_interrupted_after_its_last_step_completes(workspace, monkeypatch):
    assert workspace.run_tune(*RUN, "output_dir=whole").code == 0

    def cut(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tunekit.publishing.model_card.write_model_card", cut)
        assert workspace.run_tune(*RUN).code == 130
    assert not (workspace.folder / "out/final").exists()
    assert "verify/mean_logit_diff" in workspace.deterministic_metrics("out")[-1]
    assert workspace.run_tune(*RUN).code == 0
    assert workspace.is_same_run("whole", "out")


def test_run_with_an_adapter_is_merged_when_all_weights_are_trained(workspace):
    assert workspace.run_tune(*LORA).code == 0
    assert workspace.run_tune("merge", str(workspace.model), "out", "merged").code == 0
    for name in ("out", "merged"):
        assert workspace.run_tune(*RUN, f"model={name}", f"output_dir=from-{name}").code == 0
    assert workspace.is_same_run("from-out", "from-merged")


def test_training_of_an_adapter_continues(workspace):
    assert workspace.run_tune(*LORA).code == 0
    assert workspace.run_tune(*LORA, "adapter.adapter_path=out/final", "output_dir=explicit").code == 0
    for adapter, name in (("adapter.rank=4", "out/final"), ("adapter=lora", "out")):  # the default rank is 16
        assert workspace.run_tune(*LORA, adapter, f"model={name}", "output_dir=continued", "--overwrite").code == 0
        assert workspace.is_same_run("continued", "explicit")
    refused = workspace.run_tune(*LORA, "model=out", "adapter.rank=8", "output_dir=other")
    assert refused.code == 2 and refused.err.endswith("Set adapter.rank=4.\n")


def test_adapter_on_a_run_names_its_final_checkpoint(workspace):
    assert workspace.run_tune(*RUN).code == 0
    assert workspace.run_tune(*LORA, "model=out", "output_dir=adapter").code == 0
    config = json.loads((workspace.folder / "adapter/final/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(workspace.folder / "out/final")
    assert workspace.run_tune("validate", "sft.yaml", "model=adapter").code == 0
