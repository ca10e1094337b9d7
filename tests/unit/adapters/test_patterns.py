"""Patterns of module names match in polynomial time, or are refused."""

import json
from pathlib import Path

import pytest

from tunekit.adapters.module_patterns import compile_pattern
from tunekit.checkpoint.peft_config import PeftConfigFile
from tunekit.errors import UserError

EXPONENTIAL = ("(([a-z_.0-9])+)+!", "(a|a)*b", "(?:x+x+)+y", "(a?){40}b", "(?=(a+)+b)c")
SLOW = (".*.*.*.*x",)
COMMON = (
    "q_proj",
    r"(.*\.)?q_proj",
    r".*\.layers\.(\d+|1[0-9])\.(self_attn|mlp)\.(q|k|v)_proj",
    r"layers\.[0-9]{2}\.mlp",
)


@pytest.mark.parametrize("pattern", (*EXPONENTIAL, *SLOW, "(", "(" * 5000 + ")" * 5000), ids=lambda p: p[:20])
def test_slow_and_invalid_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"repe|subpattern|nested"):
        compile_pattern(pattern)


@pytest.mark.parametrize("pattern", COMMON)
def test_common_patterns_are_accepted(pattern: str) -> None:
    assert compile_pattern(pattern).pattern == pattern


@pytest.mark.parametrize("table", ["rank_pattern", "alpha_pattern"])
def test_pattern_of_a_downloaded_adapter_is_refused(table: str, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, table: {EXPONENTIAL[0]: 4}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    file = PeftConfigFile.open(tmp_path)
    with pytest.raises(UserError, match=f"{table}: .*repeats a group"):
        file.rank_and_alpha("model.layers.0.self_attn.q_proj" * 4, file.adapter)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "target_parameters", "modules_to_save", "use_rslora"])
def test_values_of_the_wrong_type_are_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, key: 3}))
    with pytest.raises(UserError, match=f"{key}: must be"):
        PeftConfigFile.open(tmp_path)
