"""Initial values, targets, updates and errors of adapters."""

from pathlib import Path

import peft
import pytest
import torch

from tests.helpers.random_checkpoints import (
    load_model,
    load_transformers_model,
    make_checkpoint,
    random_tokens,
    relative_error,
    shuffle_adapter,
    train,
)
from tunekit import build
from tunekit.adapters import config as adapters
from tunekit.adapters.config import DoRAConfig, FrozenModel, LoRAConfig, NoAdapter, adapter_tensors, pissa_factors
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.sharding import copy_to_shard
from tunekit.errors import FieldError, UserError
from tunekit.hub import download
from tunekit.models import feed_forward, gated_delta_net, mla
from tunekit.models.linear import GroupedLinear, Linear
from tunekit.models.precision import PrecisionConfig
from tunekit.models.weight_init import named_generator
from tunekit.quantization.config import NF4Config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama-biases")


FRESH = [
    LoRAConfig(4),
    LoRAConfig(4, target_modules=("all-linear", "head", "embed"), use_rslora=True),
    DoRAConfig(4),
    DoRAConfig(4, target_modules=("all-linear", "head")),
    LoRAConfig(4, init="pissa"),
    DoRAConfig(4, init="pissa", target_modules=("all-linear", "head")),
    LoRAConfig(4, init="pissa", target_modules=("all-linear", "embed")),
    LoRAConfig(4, init="pissa", rank_pattern={"q_proj": 7, "mlp": 2}, alpha_pattern={"v_proj": 3.0}),
]


@pytest.mark.parametrize("adapter", FRESH)
@torch.no_grad()
def test_fresh_adapter_does_not_change_logits(adapter: LoRAConfig, folder: Path) -> None:
    """Adding and removing the principal components of PiSSA rounds by 0.8e-6 to 1e-6.

    The base model itself differs from its float64 logits by 1.3e-6.
    """
    tolerance = 4e-6 if adapter.init == "pissa" else 0
    assert (
        relative_error(load_model(folder, adapter).eval()(random_tokens()), load_model(folder)(random_tokens()))
        <= tolerance
    )


@pytest.mark.parametrize("adapter", FRESH)
def test_param_groups_contain_only_the_adapter(adapter: LoRAConfig, folder: Path) -> None:
    model = load_model(folder, adapter)
    trained = {id(p) for parameters, _ in adapter.param_groups(model) for p in parameters}
    assert trained == {id(p) for p in model.parameters() if p.requires_grad}
    assert trained == {id(p) for name, p in model.named_parameters() if "lora_" in name}


def test_no_adapter_trains_all_weights_and_frozen_model_none(folder: Path) -> None:
    model = load_model(folder)
    assert {id(p) for ps, _ in NoAdapter().param_groups(model) for p in ps} == {id(p) for p in model.parameters()}
    assert not [p for p in load_model(folder, FrozenModel()).parameters() if p.requires_grad]


@pytest.mark.parametrize(("adapter", "scale"), [
    (LoRAConfig(4, 6.0), 1.5), (LoRAConfig(4, 6.0, use_rslora=True), 3.0), (DoRAConfig(4, 6.0), 1.5),
])  # fmt: skip
def test_lora_update_is_the_product_of_its_factors(adapter: LoRAConfig, scale: float) -> None:
    """The layer has the weight W + s B A; the rows of DoRA have the norms of its magnitude vector."""
    layer = Linear(7, 5, bias=True)
    adapter.wrap_layer(layer, adapter.rank, adapter.alpha)
    layer.to_empty(device="cpu").load_state_dict({n: torch.randn(p.shape) for n, p in layer.state_dict().items()})
    weight = layer.weight.double() + scale * layer.lora_B.weight.double() @ layer.lora_A.weight.double()
    if isinstance(adapter, DoRAConfig):
        weight *= (layer.lora_magnitude_vector / weight.norm(dim=1))[:, None]
    x = torch.randn(3, 7)
    assert relative_error(layer(x).double(), x.double() @ weight.T + layer.bias.double()) < 1e-6
    assert (
        relative_error(adapter.delta(layer).double(), scale * (layer.lora_B.weight @ layer.lora_A.weight).double())
        < 1e-6
    )


@pytest.mark.parametrize("shape", [(40, 22), (23, 90), (200, 150)])
@pytest.mark.parametrize(
    "adapter", [LoRAConfig(8, 3.0, init="pissa"), DoRAConfig(8, 3.0, init="pissa", use_rslora=True)]
)
def test_pissa_init_is_the_best_low_rank_approximation(adapter: LoRAConfig, shape: tuple[int, int]) -> None:
    layer = Linear(*reversed(shape), bias=False)
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.weight)
    adapter.wrap_layer(layer, adapter.rank, adapter.alpha)
    for factor in (layer.lora_A, layer.lora_B):
        factor.to_empty(device="cpu")
    layer.lora_A0, layer.lora_B0 = torch.empty(8, shape[1]), torch.empty(shape[0], 8)
    if isinstance(adapter, DoRAConfig):
        layer.lora_magnitude_vector = torch.nn.Parameter(torch.empty(shape[0]))
    tensors = adapter_tensors(layer) | {"lora_A0": layer.lora_A0, "lora_B0": layer.lora_B0}
    for name, value in adapter.initial_values(layer, {}, named_generator(0, "layer")).items():
        copy_to_shard(tensors[name], value)
    u, s, v = torch.linalg.svd(layer.weight.detach().double(), full_matrices=False)
    best = u[:, :8] * s[:8] @ v[:8]
    a, b = layer.lora_A.weight.detach().double(), layer.lora_B.weight.detach().double()
    residual = (layer.weight.double() - layer.lora_scale * b @ a).norm()
    assert residual <= (layer.weight.double() - best).norm() * (1 + 1e-4)
    if min(shape) < 24:  # larger random matrices have no dominant singular values
        assert relative_error(layer.lora_scale * b @ a, best) < 1e-5
        for gram in (a @ a.T, b.T @ b):  # both factors contain the square root of each singular value
            assert relative_error(gram * layer.lora_scale, torch.diag(s[:8])) < 1e-5


def test_pissa_is_exact_for_a_decaying_spectrum() -> None:
    """Unlike noise, weights of trained models have dominant singular values."""
    u, v = torch.linalg.qr(torch.randn(120, 120))[0], torch.linalg.qr(torch.randn(90, 90))[0]
    s = 10 * 0.9 ** torch.arange(90.0)
    weight = u[:, :90] * s @ v.T
    a, b = pissa_factors(weight, 8, named_generator(0, "layer"))
    assert relative_error(b @ a, u[:, :8] * s[:8] @ v.T[:8]) < 1e-5


def test_initial_values_depend_only_on_seed_and_name(folder: Path) -> None:
    def values(adapter: LoRAConfig, seed: int) -> dict[str, torch.Tensor]:
        return {n: p.detach() for n, p in load_model(folder, adapter, seed=seed).named_parameters() if "lora_" in n}

    torch.manual_seed(5)
    narrow = values(LoRAConfig(4, target_modules="attn"), 0)
    torch.manual_seed(6)
    wide = values(LoRAConfig(4), 0)
    assert all(torch.equal(wide[name], p) for name, p in narrow.items())
    reseeded = values(LoRAConfig(4), 1)
    assert not any(torch.equal(wide[name], p) for name, p in reseeded.items() if "lora_A" in name)
    a = wide["layers.0.attn.q_proj.lora_A.weight"]
    assert not torch.equal(a, wide["layers.1.attn.q_proj.lora_A.weight"])
    assert 0.9 * 48**-0.5 < a.abs().max() <= 48**-0.5, "uniform, as in PEFT"


ATTN = {f"layers.{i}.attn.{x}_proj" for i in range(3) for x in "qkvo"}
MLP = {f"layers.{i}.mlp.{x}_proj" for i in range(3) for x in ("gate", "up", "down")}


@pytest.mark.parametrize(("targets", "expected"), [
    ("attn", ATTN),
    ("mlp", MLP),
    ("all-linear", ATTN | MLP),
    ("head", {"head"}),
    (("embed", "head"), {"embed", "head"}),
    ("q_proj", {f"layers.{i}.attn.q_proj" for i in range(3)}),
    (r"layers\.[12]\..*", {n for n in ATTN | MLP if n[7] in "12"}),
    ((r"layers\.0\.mlp\.up_proj", "[kv]_proj"),
     {"layers.0.mlp.up_proj"} | {n for n in ATTN if n[-6] in "kv"}),
])  # fmt: skip
def test_target_modules_select_layers(targets: str | tuple[str, ...], expected: set[str], folder: Path) -> None:
    assert LoRAConfig(target_modules=targets).target_layers(load_model(folder)).keys() == expected
    adapter = LoRAConfig(4, target_modules=targets)
    model = load_model(folder, adapter)
    assert adapter.target_layers(model).keys() == expected
    assert {n.partition(".lora_")[0] for n, _ in model.named_parameters() if ".lora_" in n} == expected


def test_patterns_without_a_match_are_errors(folder: Path) -> None:
    with pytest.raises(UserError, match="qproj.*q_proj"):
        load_model(folder, LoRAConfig(target_modules=("k_proj", "qproj")))
    with pytest.raises(UserError, match="attn, mlp, all-linear, lm_head"):
        load_model(folder, LoRAConfig(target_modules="all"))
    with pytest.raises(UserError, match="dora.*embed"):
        load_model(folder, DoRAConfig(target_modules=("attn", "embed")))
    with pytest.raises(UserError, match=r"adapter\.rank_pattern: .*up_proj"):
        load_model(folder, LoRAConfig(target_modules="attn", rank_pattern={"up_proj": 3}))
    with pytest.raises(UserError, match=r"adapter\.alpha_pattern: .*head"):
        load_model(folder, LoRAConfig(alpha_pattern={"head": 3.0}))
    with pytest.raises(UserError, match=r"adapter\.modules_to_save: .*router"):
        load_model(folder, LoRAConfig(modules_to_save=("router",)))
    with pytest.raises(UserError, match=r"adapter\.modules_to_save: layers\.0\.attn\.q_proj"):
        load_model(folder, LoRAConfig(modules_to_save=("q_proj",)))


@pytest.mark.parametrize(("values", "field"), [
    ({"rank": 0}, "rank"), ({"alpha": 0.0}, "alpha"), ({"target_modules": ()}, "target_modules"),
    ({"dropout": 1.0}, "dropout"), ({"dropout": -0.1}, "dropout"), ({"loraplus_lr_ratio": 0.0}, "loraplus_lr_ratio"),
    ({"target_modules": "(q"}, "target_modules"), ({"target_modules": ("attn", "*")}, "target_modules"),
    ({"init": "pissa", "adapter_path": "x"}, "adapter_path"),
    ({"rank_pattern": {"q": 0}}, "rank_pattern"), ({"rank_pattern": {"(": 2}}, "rank_pattern"),
    ({"alpha_pattern": {"q": 0.0}}, "alpha_pattern"),
    ({"alpha_pattern": {"*": 2.0}}, "alpha_pattern"), ({"modules_to_save": ("norm", ")")}, "modules_to_save"),
])  # fmt: skip
def test_invalid_values_name_their_field(values: dict, field: str) -> None:
    for kind in (LoRAConfig, DoRAConfig):
        with pytest.raises(FieldError) as caught:
            kind(**values)
        assert caught.value.field == field


def test_rank_and_alpha_patterns_use_the_first_match(folder: Path) -> None:
    """The first pattern that fits counts."""
    patterns = {
        "rank_pattern": {r"layers\.0\..*q_proj": 3, "[qk]_proj": 5, "mlp": 6},
        "alpha_pattern": {"k_proj": 5.0, "head": 9.0},
    }
    adapter = LoRAConfig(4, 8.0, target_modules=("all-linear", "head"), **patterns)
    actual = {
        n: (m.lora_A.out_features, m.lora_scale) for n, m in adapter.target_layers(load_model(folder, adapter)).items()
    }
    expected = {n: (4, 2.0) for n in ATTN} | {n: (6, 8 / 6) for n in MLP} | {"head": (4, 9 / 4)}
    expected |= {f"layers.{i}.attn.q_proj": (5, 8 / 5) for i in (1, 2)} | {"layers.0.attn.q_proj": (3, 8 / 3)}
    assert actual == expected | {f"layers.{i}.attn.k_proj": (5, 1.0) for i in range(3)}
    rslora = LoRAConfig(
        4,
        8.0,
        target_modules="q_proj",
        use_rslora=True,
        rank_pattern={r"layers\.0\..*": 9},
        alpha_pattern={r"layers\.1\..*": 3.0},
    )
    scales = [layer.lora_scale for layer in rslora.target_layers(load_model(folder, rslora)).values()]
    assert scales == pytest.approx([8 / 3, 3 / 2, 8 / 2])


NORMS = {f"layers.{i}.{x}_norm" for i in range(3) for x in ("attn", "mlp")} | {"norm"}


@pytest.mark.parametrize(("options", "expected"), [
    ({"modules_to_save": ("head",)}, {"head.weight"}),
    ({"modules_to_save": ("embed", "norm")}, {"embed.weight", "norm.weight"}),
    ({"modules_to_save": ("norms",)}, {f"{name}.weight" for name in NORMS}),
    ({"modules_to_save": (r"layers\.1\.mlp\.up_proj",)}, {"layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.bias"}),
    ({"bias": "lora_only"}, {f"{name}.bias" for name in ATTN}),
    ({"bias": "all"}, {f"{name}.bias" for name in ATTN | MLP}),
    ({"bias": "all", "modules_to_save": ("norm",)}, {f"{name}.bias" for name in ATTN | MLP} | {"norm.weight"}),
])  # fmt: skip
@pytest.mark.parametrize("kind", [LoRAConfig, DoRAConfig])
def test_biases_and_modules_to_save_are_trained(
    kind: type[LoRAConfig], options: dict, expected: set[str], folder: Path
) -> None:
    adapter = kind(4, target_modules="attn", **options)
    model = load_model(folder, adapter, PrecisionConfig("fp32"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == expected | {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert {id(p) for ps, _ in adapter.param_groups(model) for p in ps} == {
        id(model.get_parameter(name)) for name in trained
    }
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, adapter)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trained


def test_quantized_layer_in_modules_to_save_is_an_error() -> None:
    base = HFCheckpoint.open(download.resolve_model_dir("tunekit/nano"))
    model = build.build_meta_model(
        base, NF4Config(), LoRAConfig(4, target_modules="attn", modules_to_save=("norms", "head"))
    )
    assert model.head.weight.requires_grad
    with pytest.raises(UserError, match=r"adapter\.modules_to_save: layers\.0\.mlp\.up_proj"):
        build.build_meta_model(base, NF4Config(), LoRAConfig(4, target_modules="attn", modules_to_save="up_proj"))


def test_tied_head_is_trained_with_the_embedding_unless_untied(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, "llama3.2")
    for saved in ("embed", "head"):
        model = load_model(base, LoRAConfig(4, modules_to_save=(saved,)))
        assert model.head.weight is model.embed.weight
        assert model.head.weight.requires_grad
    for saved, frozen in (("embed", "head"), ("head", "embed")):
        model = load_model(base, LoRAConfig(4, modules_to_save=(saved,), untie_embeddings=True))
        assert torch.equal(model.head.weight, model.embed.weight)
        assert model.head.weight is not model.embed.weight
        assert model.get_submodule(saved).weight.requires_grad
        assert not model.get_submodule(frozen).weight.requires_grad
    with pytest.raises(UserError, match=r"adapter\.modules_to_save: embed_tokens "):
        load_model(base, LoRAConfig(4, target_modules="head", modules_to_save=("embed",)))
    with pytest.raises(UserError, match=r"adapter\.target_modules: lm_head "):
        load_model(base, LoRAConfig(4, target_modules="head", trainable_token_indices=(3,)))
    load_model(base, LoRAConfig(4, target_modules="head", modules_to_save=("embed",), untie_embeddings=True))


EXPERTS = {f"layers.{i}.mlp.experts.{x}_proj" for i in range(3) for x in ("gate", "up", "down")}
SHARED = {f"layers.{i}.mlp.shared.{x}_proj" for i in range(3) for x in ("gate", "up", "down")}
GATES = {f"layers.{i}.mlp.shared_gate" for i in range(3)}


@pytest.mark.parametrize(("targets", "expected"), [
    ("all-linear", ATTN | SHARED | GATES), ("mlp", SHARED | GATES), ("experts", EXPERTS), (("up_proj",), None),
])  # fmt: skip
def test_experts_are_adapted_only_if_named(targets: str, expected: set[str] | None, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "qwen2-moe-sliding"), adapter := LoRAConfig(4, target_modules=targets))
    ups = {name for name in EXPERTS | SHARED if "up_proj" in name}
    assert adapter.target_layers(model).keys() == (expected or ups)


@torch.no_grad()
def test_expert_update_is_the_product_of_its_factors() -> None:
    layer, adapter = GroupedLinear(3, 8, 5, bias=True), LoRAConfig(4, 6.0)
    adapter.wrap_layer(layer, 4, 6.0)
    layer.to_empty(device="cpu").load_state_dict({n: torch.randn(p.shape) for n, p in layer.state_dict().items()})
    x, sizes = torch.randn(9, 8), torch.tensor([4, 0, 5])
    weight = layer.weight + 1.5 * layer.lora_B @ layer.lora_A
    rows = zip(x.split([4, 5]), weight[[0, 2]], layer.bias[[0, 2]], strict=True)
    assert relative_error(layer(x, sizes), torch.cat([part @ w.T + b for part, w, b in rows])) < 1e-5


def test_experts_support_loraplus_but_not_dora_or_pissa(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, "mixtral")
    model = load_model(base, adapter := LoRAConfig(4, target_modules="experts", loraplus_lr_ratio=8.0))
    lr_factors = {id(p): lr_factors for parameters, lr_factors in adapter.param_groups(model) for p in parameters}
    factors = {name: lr_factors[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    assert factors == {name: 8.0 if "lora_B" in name else 1.0 for name in factors}
    assert relative_error(model(random_tokens()).detach(), load_model(base)(random_tokens()).detach()) < 1e-6, (
        "a fresh adapter does not change logits"
    )
    with pytest.raises(UserError, match="dora.*experts"):
        load_model(base, DoRAConfig(target_modules="experts"))
    with pytest.raises(UserError, match="pissa.*experts.*target_modules"):
        load_model(base, LoRAConfig(target_modules="experts", init="pissa"))


def test_pissa_rank_above_full_rank_is_an_error(folder: Path) -> None:
    with pytest.raises(UserError, match=r"adapter\.rank: .*999"):
        load_model(folder, LoRAConfig(999, init="pissa"))
    load_model(folder, LoRAConfig(999))


@pytest.mark.parametrize(
    "adapter",
    [
        LoRAConfig(4, target_modules=("all-linear", "head", "embed"), dropout=0.3),
        DoRAConfig(4, target_modules=("all-linear", "head")),
        LoRAConfig(4, init="pissa"),
    ],
)
@torch.no_grad()
def test_disabled_adapter_gives_the_base_model(adapter: LoRAConfig, folder: Path) -> None:
    model, base = load_model(folder, adapter), load_model(folder, FrozenModel())(random_tokens())
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.add_(torch.randn_like(p))
    changed = model.eval()(random_tokens())
    with adapter.disabled(model.train()):
        assert torch.equal(model(random_tokens()), base)
    with pytest.raises(ZeroDivisionError), adapter.disabled(model):
        raise ZeroDivisionError
    assert torch.equal(model.eval()(random_tokens()), changed)
    assert relative_error(changed, base) > 1e-2


SHARED_INPUT_LAYERS = {  # layers of a block with the same input
    "deepseek-v3": ("q_a_proj", "kv_a_proj_with_mqa"),
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba"),
    "qwen3.5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "mixtral": ("experts.gate_proj", "experts.up_proj"),
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", SHARED_INPUT_LAYERS)
def test_layers_with_a_shared_input_are_fused(
    name: str, dropout: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One matmul with the concatenated A, and the gradients of separate layers; with dropout each layer has its own
    mask.
    """
    targets = tuple(rf".*\.{leaf}" for leaf in SHARED_INPUT_LAYERS[name])
    model = load_model(
        make_checkpoint(tmp_path, name),
        LoRAConfig(4, target_modules=targets, dropout=dropout, rank_pattern={targets[-1]: 6}),
    )
    shuffle_adapter(model)
    calls: list[str] = []
    for name_of_kernel in ("lora_linear", "grouped_mm"):
        kernel = vars(adapters)[name_of_kernel]
        monkeypatch.setattr(
            adapters,
            name_of_kernel,
            lambda *args, kernel=kernel, name_of_kernel=name_of_kernel: (calls.append(name_of_kernel), kernel(*args))[
                1
            ],
        )
    gradients, counts = [], []
    for unfused in (False, True):
        for module in (mla, gated_delta_net, feed_forward) if unfused else ():
            monkeypatch.setattr(
                module, "shared_input_linears", lambda layers, *inputs: tuple(layer(*inputs) for layer in layers)
            )
        torch.manual_seed(1)
        calls.clear()
        model.zero_grad()
        model(random_tokens()).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        counts.append(len(calls))
    assert counts[0] < counts[1] or (dropout and name == "mixtral")
    for fused_grad, unfused_grad in zip(*gradients, strict=True):
        # sums in another order, through a model with large updates; measured: 1e-5
        assert relative_error(fused_grad, unfused_grad) < 3e-5


@torch.no_grad()
def test_fresh_pissa_adapter_in_bf16_does_not_change_logits(folder: Path) -> None:
    model = load_model(folder, LoRAConfig(4, init="pissa"), PrecisionConfig("fp32", master_dtype="bf16"))
    assert relative_error(model.eval()(random_tokens()), load_model(folder)(random_tokens())) < 6e-6


@pytest.mark.parametrize("adapter", [
    LoRAConfig(4, loraplus_lr_ratio=8.0, target_modules=("all-linear", "head")),
    LoRAConfig(4, loraplus_lr_ratio=8.0, target_modules="embed"), DoRAConfig(4, loraplus_lr_ratio=8.0),
])  # fmt: skip
def test_loraplus_scales_the_learning_rate_of_b(adapter: LoRAConfig, folder: Path) -> None:
    model = load_model(folder, adapter)
    factor = {id(p): factor for parameters, factor in adapter.param_groups(model) for p in parameters}
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert factor[id(p)] == (8.0 if "lora_B" in name or "embedding_B" in name else 1.0), name


def test_dropout_masks_match_peft(folder: Path) -> None:
    """Dropout is applied to the input of the adapter, only in training."""
    adapter = LoRAConfig(4, 8.0, dropout=0.4)
    model = load_model(folder, adapter)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.4, target_modules="all-linear")
    peft_model = peft.get_peft_model(load_transformers_model(folder), config)
    shuffle_adapter(peft_model)
    peft_weights = {n.replace(".default", ""): p for n, p in peft_model.named_parameters() if "lora_" in n}
    names = {"self_attn": "attn", "base_model.model.model.": ""}
    for name, p in peft_weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        model.get_parameter(name).data.copy_(p)
    actual, expected = [], []
    with torch.no_grad():
        for results, module in ((actual, model.train()), (expected, peft_model.train())):
            for seed in (1, 2):
                torch.manual_seed(seed)
                logits = module(random_tokens())
                results.append(logits if module is model else logits.logits)
        # Large updates amplify rounding: logits differ from float64 by 2.0e-5 (tunekit) and 1.4e-5 (peft), and by
        # 0.4e-5 to 3.0e-5 from each other. Another mask would change them by 1e-2.
        assert relative_error(actual[0], expected[0]) < 1e-4
        assert relative_error(actual[1], expected[1]) < 1e-4
        assert relative_error(actual[0], actual[1]) > 1e-2
        assert relative_error(model.eval()(random_tokens()), peft_model.eval()(random_tokens()).logits) < 1e-4


def test_bf16_compute_trains_fp32_weights(folder: Path) -> None:
    model = load_model(folder, FRESH[3], PrecisionConfig("bf16", "fp32", "bf16"))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    logits = model(random_tokens())
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits.float().detach(), load_model(folder)(random_tokens()).detach()) < 0.1
