"""Overrides of config.json give the logits of transformers with the same config, and are part of the result."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.helpers.random_checkpoints import (
    SHAPES,
    build,
    load_inference_model,
    load_transformers_model,
    make_checkpoint,
    relative_error,
    save,
)
from tunekit import build as construction
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint import atomic, final_checkpoint, merge
from tunekit.checkpoint.adapter_dir import CONFIG_KEY, AdapterDir
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.peft_config import CONFIG
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import LinearScaling, YarnScaling
from tunekit.publishing.snippets import config_options
from tunekit.quantization.config import NoQuantization

FP32 = PrecisionConfig("fp32", "fp32", "fp32")
CONTEXT, LONGER = 16, 64
SHAPE = SHAPES["llama-biases"] | {"max_position_embeddings": CONTEXT}
PAIRS = (SHAPE.get("head_dim") or SHAPE["hidden_size"] // SHAPE["num_attention_heads"]) // 2
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn-all": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + i / 8 for i in range(PAIRS)],
        "long_factor": [2.0 + i / 4 for i in range(PAIRS)],
    },
}
TOKENS = torch.arange(2 * 40).view(2, 40) % 60


def load_overridden(folder: Path, overrides: dict, adapter: NoAdapter | LoRAConfig) -> tuple[HFCheckpoint, Decoder]:
    source = HFCheckpoint.open(folder).with_config_overrides(overrides)
    dist = DistributedContext(3, "cpu")
    return source, construction.build_model(source, NoQuantization(), adapter, FP32, MemoryConfig(), dist).eval()


@pytest.mark.parametrize("config_version", [4, 5])
@pytest.mark.parametrize("name", SCALINGS)
@torch.no_grad()
def test_rope_scaling_equals_transformers(name: str, config_version: int, tmp_path: Path) -> None:
    """Equal to a config that is set by hand, and to the files of the result."""
    folder = save(build(SHAPE), tmp_path / "base", config_version)
    scaling = SCALINGS[name]
    source, model = load_overridden(folder, {"max_position_embeddings": LONGER, "rope_scaling": scaling}, NoAdapter())
    reference = load_transformers_model(folder)
    config = reference.config.to_dict() | {"max_position_embeddings": LONGER}
    theta = config["rope_parameters"]["rope_theta"]
    original = {} if name == "linear" else {"original_max_position_embeddings": CONTEXT}
    config["rope_parameters"] = {"rope_theta": theta, **scaling, **original}
    expected = type(reference)(transformers.AutoConfig.for_model(**config)).eval()
    expected.load_state_dict(reference.state_dict())
    logits = model(TOKENS)
    assert relative_error(logits, expected(TOKENS).logits) < 3e-5
    assert relative_error(logits, reference(TOKENS).logits) > 1e-3, "the scaling changes the logits"
    with atomic.AtomicDir(tmp_path / "out") as out:
        final_checkpoint.save_final(NoAdapter(), out, model, source)
    assert relative_error(load_transformers_model(tmp_path / "out")(TOKENS).logits, logits) < 3e-5
    assert HFCheckpoint.open(tmp_path / "out").spec == source.spec
    assert source.spec.context == LONGER


@pytest.mark.parametrize("config_version", [4, 5])
@torch.no_grad()
def test_adapter_keeps_the_overrides_of_its_base(config_version: int, tmp_path: Path) -> None:
    """Loaded as an adapter, merged, and in PEFT as the model card says, the logits are those of the model in memory."""
    folder = save(build(SHAPE), tmp_path / "base", config_version)
    overrides = {"max_position_embeddings": LONGER, "rope_scaling": SCALINGS["yarn"]}
    adapter = LoRAConfig(4)
    source, model = load_overridden(folder, overrides, adapter)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1)
    with atomic.AtomicDir(tmp_path / "adapter") as out:
        final_checkpoint.save_final(adapter, out, model, source)
    logits = model(TOKENS)
    assert relative_error(load_inference_model(tmp_path / "adapter")(TOKENS), logits) < 3e-5
    options = eval(f"dict({config_options({**AdapterDir.open(tmp_path / 'adapter').config_changes})[2:]})")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)
    peft_model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert relative_error(peft_model(TOKENS).logits, logits) < 3e-5
    checkpoint, _, _ = construction.resolve_model(str(tmp_path / "adapter"))
    with atomic.AtomicDir(tmp_path / "merged") as out:
        merge.merge_adapter(checkpoint, checkpoint.open_adapter(tmp_path / "adapter"), out)
    assert relative_error(load_transformers_model(tmp_path / "merged")(TOKENS).logits, logits) < 3e-5


def test_new_run_from_an_adapter_needs_its_overrides(tmp_path: Path) -> None:
    folder, adapter = save(build(SHAPE), tmp_path / "base"), LoRAConfig(4)
    source, model = load_overridden(folder, {"max_position_embeddings": LONGER}, adapter)
    with atomic.AtomicDir(tmp_path / "adapter") as out:
        final_checkpoint.save_final(adapter, out, model, source)
    start = LoRAConfig(4, adapter_path=str(tmp_path / "adapter"))
    load_overridden(folder, {"max_position_embeddings": LONGER}, start)
    with pytest.raises(UserError, match=r"^config_overrides\.max_position_embeddings: .* 64, got 16\. "):
        load_overridden(folder, {}, start)


@pytest.mark.parametrize("text", ["[1]", "{", '{"hidden_size": 1e99}', '{"model_type": "qwen3"}'])
def test_forged_overrides_of_an_adapter_are_one_line(text: str, tmp_path: Path) -> None:
    folder = save(build(SHAPE), tmp_path / "base")
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors", {CONFIG_KEY: text})
    (tmp_path / CONFIG).write_text('{"peft_type": "LORA"}')
    adapter = AdapterDir.open(tmp_path)
    with pytest.raises(UserError) as error:
        HFCheckpoint.open(folder).with_config_overrides(adapter.config_changes)
    assert "\n" not in str(error.value)


def test_missing_values_come_from_the_checkpoint(tmp_path: Path) -> None:
    folder = save(build(SHAPE), tmp_path)

    def scaling(**overrides: Any) -> Any:
        return HFCheckpoint.open(folder).with_config_overrides(overrides).spec.layers[0].mixer.rope.scaling

    yarn = scaling(max_position_embeddings=LONGER, rope_scaling={"rope_type": "yarn"})
    assert isinstance(yarn, YarnScaling) and (yarn.factor, yarn.context) == (LONGER / CONTEXT, CONTEXT)
    assert scaling(max_position_embeddings=LONGER, rope_scaling={"rope_type": "linear"}) == LinearScaling(4.0)
    assert scaling(max_position_embeddings=LONGER) is None


@pytest.mark.parametrize("config_version", [4, 5])
def test_rope_theta_and_null_scaling(config_version: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama3.2", config_version)
    base = HFCheckpoint.open(folder)
    assert base.spec.layers[0].mixer.rope.scaling is not None
    rope = base.with_config_overrides({"rope_theta": 123.0, "rope_scaling": None}).spec.layers[0].mixer.rope
    assert (rope.theta, rope.scaling) == (123.0, None)


def test_text_model_of_a_multimodal_checkpoint_is_overridden(tmp_path: Path) -> None:
    base = HFCheckpoint.open(make_checkpoint(tmp_path, "gemma3-vision"))
    changed = base.with_config_overrides({"max_position_embeddings": 99})
    assert changed.spec.context == changed.config["text_config"]["max_position_embeddings"] == 99
    assert changed.config_changes == {"max_position_embeddings": 99}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"rope_scalling": {}}, r"^config_overrides\.rope_scalling: .* 'rope_scaling'"),
        ({"attention_dropuot": 0.1}, r"^config_overrides\.attention_dropuot: .*attention_dropout"),
        ({"zzz": 1}, r"^config_overrides\.zzz: "),
        ({"model_type": "qwen3"}, r"^config_overrides\.model_type: cannot"),
        ({"max_position_embeddings": 0}, ".*config_overrides.*max_position_embeddings must be"),
        ({"rope_scaling": "yarn"}, r"^config_overrides\.rope_scaling must be an object, got 'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ".*config_overrides.*'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ".*config_overrides.*low_freq_factor"),
    ],
)
def test_invalid_overrides_are_one_line(overrides: dict, problem: str, tmp_path: Path) -> None:
    checkpoint = HFCheckpoint.open(make_checkpoint(tmp_path, "llama-biases"))
    with pytest.raises(UserError, match=problem) as error:
        checkpoint.with_config_overrides(overrides)
    assert "\n" not in str(error.value)
