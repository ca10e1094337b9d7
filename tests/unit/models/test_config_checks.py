"""Invalid values in config.json are refused before anything is allocated, and by name."""

import copy
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.moe_shapes import GEMMA4
from tests.helpers.random_checkpoints import SHAPES
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.assets import BUNDLED
from tunekit.build import build_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.memory.config import MemoryConfig
from tunekit.models.families.registry import find_family
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization

NANO = BUNDLED / "model"
PRESETS = Path(find_family.__code__.co_filename).parents[1] / "presets"
CONFIGS = [json.loads(file.read_text()) for file in (NANO / "config.json", *sorted(PRESETS.glob("*/config.json")))]
HOSTILE = (
    None,
    True,
    -1,
    0,
    1,
    7,
    0.5,
    2**31,
    2**63,
    10**12,
    1e300,
    float("inf"),
    float("nan"),
    "x",
    [],
    [None],
    {},
    {"a": 1},
)
INVALID = {
    "partial_rotary_factor": (2, 1.01, -1, 0, float("nan"), "1"),
    "num_hidden_layers": (0, 10_000, 10**7, 1.5, True),
    "vocab_size": (0, 10**12, 2**63, "2048"),
    "hidden_size": (-32, 10**9, 2**63),
    "intermediate_size": (0, 10**9, 0.5),
    "head_dim": (1.5, float("inf"), -32, 10**9),
    "num_key_value_heads": (0.5, 5),
    "max_position_embeddings": (-(10**18), 0),
    "rms_norm_eps": (-1e-6, 2.0, float("inf")),
    "rope_theta": (0, -1, 0.5, float("nan"), float("inf")),
    "is_causal": (False, None, "no"),
    "layer_types": (3, "full_attention"),
    "tie_word_embeddings": ("false", [1, 2], {}, 2),
    "attention_bias": ("no", 0.5),
    "rope_scaling": ("yarn", [1]),
}


def key_paths(config: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from key_paths(value, (*prefix, key))


def set_value(config: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in INVALID.items() for value in values], ids=str
)
def test_invalid_values_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^config\.json: .*{key}"):
        find_family({**CONFIGS[0], key: value}, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size_per_layer_input": 60}, "vocab_size_per_layer_input 60 is less than vocab_size 67"),
        ({"per_layer_config": {"0": {"head_dim": -4}}}, r"per_layer_config\.0\.head_dim must be an integer from 1"),
        ({"per_layer_config": [3]}, "per_layer_config must be an object"),
    ],
)
def test_invalid_values_of_single_layers_and_embeddings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_family(GEMMA4 | changes, "config.json")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 0.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(("name", "change", "key"), [
    ("bamba", {"hidden_act": "gelu"}, "hidden_act"),
    ("falcon-h1", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    ("granite4", {"hidden_act": "gelu"}, "hidden_act"),
    ("deepseek-v2", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
    ("deepseek-v2", {"mlp_bias": True}, "mlp_bias"),
    ("deepseek-v3", {"n_group": 8, "topk_group": 4}, "n_group"),
    ("llama2", {"rope_parameters": LLAMA3}, "high_freq_factor"),
    ("llama2", {"rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 2.0}}, "beta_fast"),
    ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("gemma3", {"rope_parameters": {"full_attention": PARTIAL}}, "partial_rotary_factor"),
    ("gemma3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ("gemma3", {"rope_parameters": None, "rope_scaling": YARN | {"truncate": False}}, "truncate"),
    ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ("olmo3", {"rope_theta": 1e4}, "rope_theta"),
    ("ministral3", {"original_max_position_embeddings": 128}, "original_max_position_embeddings"),
])  # fmt: skip
def test_values_that_only_transformers_would_apply_are_refused(name: str, change: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"^config\.json: .*{key}"):
        find_family(SHAPES[name] | change, "config.json")


@pytest.mark.parametrize(("name", "old", "new"), [
    ("nemotron-h", {"mamba_n_groups": 1}, {"n_groups": 1}),
    ("nemotron-h", {"mamba_d_conv": 2, "mamba_conv_bias": None}, {"conv_kernel": 2, "use_conv_bias": False}),
    ("nemotron-h", {"num_local_experts": 4}, {"n_routed_experts": 4}),
    ("ernie4.5-moe", {"num_experts_per_tok": 2, "num_experts": 5}, {"moe_k": 2, "moe_num_experts": 5}),
    ("granite4", {"layers_block_type": ["attention"] * 3}, {"layer_types": ["full_attention"] * 3}),
    ("bamba", {"mamba_conv_bias": None}, {"mamba_conv_bias": False}),
    ("granite4", {"layer_types": ["attention"] * 3, "hidden_act": "swish"}, {"layer_types": ["full_attention"] * 3}),
])  # fmt: skip
def test_old_names_and_null_have_the_meaning_of_transformers(name: str, old: dict, new: dict) -> None:
    first, second = (find_family(SHAPES[name] | change, "config.json")[1] for change in (old, new))
    assert first == second != find_family(SHAPES[name], "config.json")[1]


def test_mutated_configs_are_read_or_refused() -> None:
    """Hostile values for any key of any preset raise nothing but UserError, and never build an oversized spec."""
    source = random.Random(0)
    for _ in range(2000):
        config = copy.deepcopy(source.choice(CONFIGS))
        for path in source.sample([*key_paths(config)], source.randint(1, 2)):
            try:
                set_value(config, path, source.choice(HOSTILE))
            except (KeyError, TypeError):  # the section itself was replaced
                continue
        try:
            _, spec = find_family(config, "config.json")
        except UserError:
            continue
        assert len(spec.layers) <= 1000 and spec.vocab <= 2**24 and spec.dim <= 2**20


def build(path: Path, adapter: NoAdapter | LoRAConfig, from_scratch: bool) -> None:
    context = DistributedContext(device="cpu")
    checkpoint = HFCheckpoint.open(path)
    build_model(checkpoint, NoQuantization(), adapter, PrecisionConfig(), MemoryConfig(), context, from_scratch)


def test_model_that_exceeds_host_memory_is_refused(tmp_path: Path) -> None:
    config = CONFIGS[0] | {"vocab_size": 2**24, "hidden_size": 2**16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not enough memory"):
        build(tmp_path, NoAdapter(), from_scratch=True)


def test_adapter_that_exceeds_host_memory_is_refused() -> None:
    with pytest.raises(UserError, match="not enough memory"):
        build(NANO, LoRAConfig(rank=100_000_000), from_scratch=False)


def test_sizes_are_compared_with_the_files_before_allocation(tmp_path: Path) -> None:
    for file in NANO.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[0] | {"vocab_size": 2**24}))
    with pytest.raises(UserError, match="embed_tokens"):
        build(tmp_path, NoAdapter(), from_scratch=False)
