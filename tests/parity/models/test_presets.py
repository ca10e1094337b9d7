"""Presets match the config of transformers and have the published number of parameters."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from tunekit import assets
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.errors import UserError
from tunekit.hub import download
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import find_family

# Number of parameters on the Hub, without the layers for multi-token prediction (DeepSeek, GLM).
PUBLISHED = {
    "deepseek_v3": 671_026_419_200,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "glm4_9b": 9_400_279_040,
    "glm4_5_air": 106_852_251_264,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "granite3_1_2b": 2_533_531_648,
    "granite3_1_8b": 8_170_848_256,
    "llama2_7b": 6_738_415_616,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "mistral_7b": 7_248_023_552,
    "mistral_nemo_12b": 12_247_782_400,
    "mixtral_8x7b": 46_702_792_704,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo3_7b": 7_298_011_136,
    "phi3_mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
    "smollm3_3b": 3_075_098_624,
}


def test_all_presets_are_tested_and_documented() -> None:
    assert {f"tunekit/{name}" for name in PUBLISHED} == assets.PRESETS.keys()
    page = (Path(__file__).parents[3] / "docs/checkpoints.md").read_text()
    assert all(f"`{name}`" in page for name in PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    source = HFCheckpoint.open(download.resolve_model_dir(f"tunekit/{name}"))
    with torch.device("meta"):
        assert sum(p.numel() for p in Decoder(source.spec).parameters()) == PUBLISHED[name]
    assert not source.has_weights
    assert source.default_dtype == torch.bfloat16


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_matches_the_config_of_transformers(name: str) -> None:
    """Keys that transformers adds or ignores do not change the model."""
    config = json.loads((assets.PRESETS[f"tunekit/{name}"] / "config.json").read_text())
    full_config = transformers.AutoConfig.for_model(**config).to_dict()
    assert full_config["architectures"] == config["architectures"]
    assert find_family(full_config, name)[1] == find_family(config, name)[1]


@pytest.mark.parametrize(("name", "expected"), [
    ("tunekit/llama3_2_1B", "Did you mean tunekit/llama3_2_1b or tunekit/llama3_2_3b"),
    ("tunekit/qwen3-8b", "Did you mean tunekit/qwen3_8b"),
    ("tunekit/nanno", "tunekit/nano?"),
    ("tunekit/xyzzy", "no bundled model tunekit/xyzzy"),
])  # fmt: skip
def test_unknown_preset_gets_a_hint(name: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        download.resolve_model_dir(name)
    assert expected in str(caught.value)
