"""What a finished run leaves: a checkpoint that was read again, its figures and its card, all there at once."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tunekit.checkpoint import final_checkpoint

RUN = ("run", "sft", "sft.yaml")
LORA = (*RUN, "adapter={kind: lora, rank: 4}")


def damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on checkpoints are written with a mistake."""
    write = final_checkpoint.save_final

    def final(adapter, folder, model, source, run):
        write(adapter, folder, model, source)
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        name = next(name for name in tensors if "v_proj" in name and "lora_B" not in name)
        save_file(tensors | {name: -tensors[name]}, file, metadata={"format": "pt"})

    monkeypatch.setattr(final_checkpoint, "save_final", final)


@pytest.mark.parametrize("words", [RUN, LORA], ids=["full", "lora"])
def test_the_result_is_verified_and_described(work, words):
    done = work.tune(*words)
    assert done.code == 0
    assert "verified: " in done.err
    final = work.folder / "out/final"
    assert {"README.md", "curves.png", "verification.json", "tokenizer.json"} <= {path.name for path in final.iterdir()}
    told = json.loads((final / "verification.json").read_text())
    assert told["passed"] is True
    last = work.numbers("out")[-1]
    assert last == {
        "step": 6,
        "verify/max_logit_diff": told["largest"],
        "verify/mean_logit_diff": told["mean"],
        "verify/top1_agreement": told["top1"],
    }


@pytest.mark.parametrize("words", [RUN, LORA], ids=["full", "lora"])
def test_files_with_a_mistake_are_kept_and_told(work, words, monkeypatch):
    damage(monkeypatch)
    done = work.tune(*words)
    final = work.folder / "out/final"
    assert done.code == 2
    line = done.err.splitlines()[-1]
    assert line.startswith("error: out/final: verification failed")
    assert "verification.json" in line
    assert "push" in line
    assert (final / "complete").is_file(), "they can be looked at"
    assert json.loads((final / "verification.json").read_text())["passed"] is False
    assert "**failed**" in (final / "README.md").read_text()
    assert work.numbers("out")[-1]["verify/max_logit_diff"] > 0
    again = work.tune(*words)
    assert again.code == 2, "it is not forgotten"
    assert again.err.splitlines()[-1] == line


def test_a_run_that_was_cut_off_behind_its_last_step_ends_as_any_other(work, monkeypatch):
    assert work.tune(*RUN, "output_dir=whole").code == 0

    def cut(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tunekit.publishing.model_card.write_model_card", cut)
        assert work.tune(*RUN).code == 130
    assert not (work.folder / "out/final").exists()
    assert "verify/mean_logit_diff" in work.numbers("out")[-1]
    assert work.tune(*RUN).code == 0
    assert work.same("whole", "out")
