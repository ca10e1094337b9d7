"""Models with gated delta nets: packing, padding, activation checkpointing, memory, initial weights and file
layouts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.helpers.random_checkpoints import (
    DEFAULT_MEMORY,
    FP32,
    FULL,
    SHAPES,
    load_model,
    make_checkpoint,
    random_tokens,
    relative_error,
    save,
)
from tunekit import build
from tunekit.checkpoint import save_model
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.kernels.sequence_layout import SequenceLayout
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.families.registry import find_family
from tunekit.models.forward_context import ForwardContext
from tunekit.models.gated_delta_net import GatedDeltaNet
from tunekit.models.recurrent import RecurrentState
from tunekit.models.spec import DeltaNet
from tunekit.quantization.config import NoQuantization

Layout = Callable[[dict[str, Tensor]], dict[str, Tensor]]
NET = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
NET += ("linear_conv_kernel_dim", "layer_types", "num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps")
NET += ("max_position_embeddings", "tie_word_embeddings")
MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
OPTIONAL = {"qwen3-next-mixed": (*NET, *MOE, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")}
OPTIONAL |= {"qwen3.5": NET, "qwen3.5-moe": (*NET, *MOE)}
NAMES = ["qwen3-next-mixed", "qwen3.5", "qwen3.5-moe-tied"]


def gradients(model: Decoder, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def delta_nets(model: Decoder) -> list[GatedDeltaNet]:
    return [module for module in model.modules() if isinstance(module, GatedDeltaNet)]


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_match_separate_documents(name: str, tmp_path: Path) -> None:
    """Logits and gradients of packed rows equal those of each document alone."""
    model = load_model(make_checkpoint(tmp_path, name))
    rows, bounds = random_tokens(2, 40), [0, 1, 3, 33, 40, 59, 80]
    documents = rows.flatten().split(torch.tensor(bounds).diff().tolist())
    positions = torch.cat([torch.arange(len(document)) for document in documents]).view_as(rows)
    packed = model(rows, positions, SequenceLayout(torch.tensor(bounds, dtype=torch.int32)))
    separate = torch.cat([model(document[None])[0] for document in documents]).view_as(packed)
    assert relative_error(packed, separate) < 1e-5
    weight = torch.randn_like(packed)
    actual, expected = gradients(model, (packed * weight).sum()), gradients(model, (separate * weight).sum())
    assert max(relative_error(actual[key], grad) for key, grad in expected.items()) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_padding_does_not_change_the_state(name: str, tmp_path: Path) -> None:
    """After a prefill of rows with several lengths, the state of each row equals that of the row alone."""
    model = load_model(make_checkpoint(tmp_path, name)).eval()
    lengths = [5, 1, 19, 2]
    rows = [random_tokens(1, length, seed=length)[0] for length in lengths]

    @torch.no_grad()
    def run_and_get_states(batch: Tensor, lengths: list[int]) -> list[RecurrentState]:
        cache = model.make_cache(len(batch), 30)
        model(batch, cache=cache, lengths=torch.tensor(lengths))
        return [layer for layer in cache.layers if isinstance(layer, RecurrentState)]

    together = run_and_get_states(pad_sequence(rows, batch_first=True, padding_value=3), lengths)
    assert len(together) == len(delta_nets(model)) > 0
    for i, row in enumerate(rows):
        for actual, expected in zip(together, run_and_get_states(row[None], [len(row)]), strict=True):
            assert relative_error(actual.tail[i], expected.tail[0]) < 2e-5
            assert relative_error(actual.states[i], expected.states[0]) < 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_activation_checkpointing_is_bit_exact(name: str, tmp_path: Path) -> None:
    folder, rows = make_checkpoint(tmp_path, name), random_tokens(2, 70)
    layout = SequenceLayout(torch.tensor([0, 33, 70, 140], dtype=torch.int32))
    plain, checkpointed = load_model(folder), load_model(folder, memory=MemoryConfig(activation_checkpointing="full"))
    weight = torch.randn(2, 70, 67)
    actual, expected = (gradients(m, (m(rows, layout=layout) * weight).sum()) for m in (checkpointed, plain))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], grad) for key, grad in expected.items())


@pytest.mark.slow
def test_compiled_layers_match_eager(tmp_path: Path) -> None:
    """The delta rule itself is not compiled. Several lengths use one model."""
    folder = make_checkpoint(tmp_path, "qwen3.5")
    plain, compiled = load_model(folder), load_model(folder, compile=True)
    for length in (20, 140):
        rows = random_tokens(2, length)
        weight = torch.randn(2, length, 67)
        actual, expected = (gradients(m, (m(rows) * weight).sum()) for m in (compiled, plain))
        assert max(relative_error(actual[key], grad) for key, grad in expected.items()) < 1e-4


def test_delta_rule_saves_only_its_inputs() -> None:
    """The delta rule saves only its inputs, an eighth of its intermediate values."""
    delta_net = GatedDeltaNet(16, DeltaNet(k_heads=4, v_heads=8, k_dim=32, v_dim=32, conv=4)).requires_grad_(False)
    saved_bytes: dict[int, int] = {}

    def record(x: Tensor) -> Tensor:
        saved_bytes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    x = torch.randn(1, 256, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        delta_net(x, ForwardContext(torch.arange(256)[None], None, None, ()))
    projections = 4 * 256 * (delta_net.in_proj_qkv.out_features + delta_net.in_proj_z.out_features)
    assert sum(saved_bytes.values()) < 4 * projections


@pytest.mark.parametrize("name", NAMES)
def test_initial_weights_are_distributed_as_in_transformers(name: str, tmp_path: Path) -> None:
    """Names and constants are equal, and random values have a similar standard deviation."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SHAPES[name] | {"linear_num_value_heads": 48})
    save(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    source = HFCheckpoint.open(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    model = build.build_model(
        source, NoQuantization(), FULL, FP32, DEFAULT_MEMORY, DistributedContext(0, "cpu"), from_scratch=True
    )
    save_model.save_model(tmp_path / "ours", model, source, quiet=True)
    actual = load_file(tmp_path / "ours" / "model.safetensors")
    assert actual.keys() == expected.keys()
    for key, tensor in actual.items():
        if tensor.unique().numel() == 1:
            assert torch.equal(tensor, expected[key]), key
        elif "A_log" in key or "conv1d" in key:
            assert 0.7 < (tensor.exp().std() / expected[key].exp().std()) < 1.4, key
            assert tensor.exp().max() < 16


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts stacked in two tensors per layer, as in the published Qwen3.5 checkpoints."""
    single = {name: t for name, t in tensors.items() if ".experts." in name}
    tensors_out = {name: t for name, t in tensors.items() if name not in single}
    for prefix in {name.partition(".experts.")[0] + ".experts." for name in single}:
        gate, up, down = (
            torch.stack([single[f"{prefix}{e}.{leaf}_proj.weight"] for e in range(7)])
            for leaf in ("gate", "up", "down")
        )
        tensors_out |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    return tensors_out


def add_language_model_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names that transformers gives to the text model of a multimodal checkpoint."""
    return {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}


def add_prediction_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add a layer for multi-token prediction, which is not loaded."""
    extra = {"mtp.fc.weight": torch.randn(3, 4).bfloat16(), "mtp.layers.0.mlp.experts.2.up_proj.weight": torch.randn(2)}
    return tensors | extra


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe", "qwen3.5-moe-vision"])
@pytest.mark.parametrize("layout", [stack_experts, add_prediction_layer])
def test_file_layouts_are_read_and_written_back(name: str, layout: Layout, tmp_path: Path) -> None:
    check_layout(make_checkpoint(tmp_path / "made", name), layout, tmp_path)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_text_model_of_a_multimodal_checkpoint(name: str, tmp_path: Path) -> None:
    check_layout(make_checkpoint(tmp_path / "made", name), add_language_model_prefix, tmp_path)


def check_layout(folder: Path, layout: Layout, path: Path) -> None:
    """The model is the same, and it is saved bit by bit as it was."""
    rows = random_tokens()
    with torch.no_grad():
        expected = load_model(folder)(rows)
        tensors = layout(load_file(folder / "model.safetensors"))
        model = load_model(write_tensors(folder, tensors))
        assert torch.equal(model(rows), expected)
    (path / "written").mkdir()
    save_model.save_model(path / "written", model, HFCheckpoint.open(folder), quiet=True)
    actual = load_file(path / "written" / "model.safetensors")
    assert actual.keys() == tensors.keys()
    assert HFCheckpoint.open(folder).has_untrained_mtp == (layout is add_prediction_layer)
    assert all(t.dtype == actual[name].dtype and torch.equal(t, actual[name]) for name, t in tensors.items())


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in OPTIONAL.items() for key in keys])
def test_omitted_config_keys_have_the_defaults_of_transformers(name: str, key: str) -> None:
    sizes = {"num_attention_heads": 16, "head_dim": 16, "linear_num_value_heads": 48, "num_experts": 16}
    shape = {k: value for k, value in (SHAPES[name] | sizes).items() if k != key}
    full_config = transformers.AutoConfig.for_model(**shape).to_dict()
    assert find_family(shape, "config.json")[1] == find_family(full_config, "config.json")[1]


@pytest.mark.parametrize(("change", "error"), [
    ({"linear_num_value_heads": 5}, "linear_num_key_heads 2"),
    ({"layer_types": ["linear_attention"]}, "layer_types .*1 .*num_hidden_layers .*3"),
    ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, "'sliding_attention' is not"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
])  # fmt: skip
def test_invalid_configs_are_errors(change: dict, error: str) -> None:
    with pytest.raises(UserError, match=error):
        find_family(SHAPES["qwen3.5"] | change, "config.json")
