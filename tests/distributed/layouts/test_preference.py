"""Preference training gives the same steps on one and two processes, packed or padded, with any adapter."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.layouts.test_layouts import DENSE, SPARSE
from tests.helpers.random_checkpoints import FP32, build, save
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_results import run_recipe
from tunekit.adapters.config import DoRAConfig, LoRAConfig
from tunekit.data.datasets import PreferenceDataset as Pairs
from tunekit.data.datasets import UnpairedPreferenceDataset
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.losses.dpo import AOT, DPO, AOTUnpaired
from tunekit.losses.reference_free import ORPO
from tunekit.losses.unpaired import BCO, KTO
from tunekit.optim.config import AdamWConfig, ConstantLRConfig
from tunekit.quantization.config import Float8Config, NF4Config
from tunekit.recipes import preference
from tunekit.training.reference_model import CopiedReference, DisableAdapterReference, PrecomputedReference

NUM_PAIRS, NUM_EVAL_PAIRS, LENGTH = 5, 3, 40
METRICS = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "logps/rejected", "entropy", "aux_loss")
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": LoRAConfig(4)},
    "dora": {"adapter": DoRAConfig(4)},
    "qlora": {"adapter": LoRAConfig(4), "quantization": NF4Config()},
}


@dataclass(frozen=True)
class RunResult:
    """Metrics of all steps, and the saved tensors of a run."""

    metrics: dict[str, list[float]]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, out: Path) -> "RunResult":
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line or "eval/loss" in line]
        names = dict.fromkeys(name for line in steps for name in line if name in METRICS or "eval/loss" in name)
        figures = {name: [line[name] for line in steps if name in line] for name in names}
        files = sorted((out / "final").glob("*.safetensors"))
        return cls(figures, {name: tensor for file in files for name, tensor in load_file(file).items()})

    def max_difference(self, other: "RunResult") -> float:
        """Maximum difference of metrics and tensors, relative to the largest value of each.

        A KL divergence is a difference of log-probabilities, so it has their absolute rounding error.
        """
        assert self.metrics.keys() == other.metrics.keys() and self.tensors.keys() == other.tensors.keys()
        kinds = {name: other.metrics["logps/rejected"] if name.endswith("kl") else [] for name in self.metrics}
        pairs = [
            (torch.tensor(values + kinds[name]), torch.tensor(other.metrics[name] + kinds[name]))
            for name, values in self.metrics.items()
        ]
        pairs += [(self.tensors[name].float(), other.tensors[name].float()) for name in self.tensors]
        return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


@pytest.fixture(scope="module")
def base_config(tmp_path_factory: pytest.TempPathFactory) -> preference.PreferenceConfig:
    """Config of two steps. Each step contains all rows, so packing does not change the steps."""
    folder = tmp_path_factory.mktemp("preference")
    generator = torch.Generator().manual_seed(5)

    def random_text(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (count,), generator=generator))

    lines = []
    for i in range(NUM_PAIRS + NUM_EVAL_PAIRS):
        row = {
            "prompt": random_text(1, 9) + " ",
            "chosen": random_text(1, 11),
            "rejected": random_text(1, 11),
            "label": i % 3 > 0,
        }
        lines.append(json.dumps(row | {"completion": row["chosen"]}) + "\n")
    source, eval_source = folder / "rows.jsonl", folder / "held.jsonl"
    source.write_text("".join(lines[:NUM_PAIRS]))
    eval_source.write_text("".join(lines[NUM_PAIRS:]))
    return preference.PreferenceConfig(
        model=str(save(build(DENSE), folder / "model")),
        data=Pairs(str(source), max_length=LENGTH),
        eval_data=Pairs(str(eval_source), max_length=LENGTH),
        output_dir=str(folder / "out"),
        optimizer=AdamWConfig(lr=0.003, eps=0.1),
        lr_scheduler=ConstantLRConfig(),
        precision=FP32,
        device="cpu",
        global_batch_size=64,
        micro_batch_size=2,
        epochs=2,
        eval_every=2,
    )


def with_packing(cfg: preference.PreferenceConfig) -> preference.PreferenceConfig:
    # a packed row has room for two documents of this length, and prompts are shared
    return replace(cfg, data=replace(cfg.data, packing=True), eval_data=replace(cfg.eval_data, packing=True))


def as_unpaired(cfg: preference.PreferenceConfig) -> preference.PreferenceConfig:
    data, eval_data = (UnpairedPreferenceDataset(rows.source, max_length=LENGTH) for rows in (cfg.data, cfg.eval_data))
    return replace(cfg, data=data, eval_data=eval_data)


SINGLE_PROCESS_RESULTS: dict[str, RunResult] = {}


def single_process_result(cfg: preference.PreferenceConfig, folder: Path) -> RunResult:
    """Result of the run on this process. Cached."""
    key = repr(replace(cfg, output_dir=""))
    if key not in SINGLE_PROCESS_RESULTS:
        run_recipe("preference", [replace(cfg, output_dir=str(folder))])
        SINGLE_PROCESS_RESULTS[key] = RunResult.read(folder)
    return SINGLE_PROCESS_RESULTS[key]


@pytest.mark.parametrize("kind", METHODS)
def test_packing_and_micro_batch_size_do_not_change_results(
    kind: str, base_config: preference.PreferenceConfig, tmp_path: Path
) -> None:
    cfg = replace(base_config, **METHODS[kind])
    expected = single_process_result(cfg, tmp_path / "one")
    assert single_process_result(with_packing(cfg), tmp_path / "packed").max_difference(expected) < 1e-5
    if kind == "lora":
        split = single_process_result(replace(cfg, micro_batch_size=1), tmp_path / "split")
        assert split.max_difference(expected) < 1e-5
    assert expected.metrics["loss"][0] == pytest.approx(0.6931472, rel=1e-6)
    assert expected.metrics["loss"][-1] < 0.69


@pytest.mark.parametrize(("kind", "references"), [
    ("lora", (DisableAdapterReference(), CopiedReference(), PrecomputedReference())),
    ("qlora", (DisableAdapterReference(), CopiedReference())),
    ("full", (CopiedReference(), PrecomputedReference())),
])  # fmt: skip
def test_all_kinds_of_reference_agree(
    kind: str, references: tuple, base_config: preference.PreferenceConfig, tmp_path: Path
) -> None:
    cfg = with_packing(replace(base_config, **METHODS[kind]))
    expected = single_process_result(cfg, tmp_path / "auto")
    for reference in references:
        actual = single_process_result(replace(cfg, reference=reference), tmp_path / type(reference).__name__)
        assert actual.max_difference(expected) < 1e-6, reference


LOSSES = {"aot": AOT(), "aot_unpaired": AOTUnpaired(), "kto": KTO(), "bco": BCO(), "orpo": ORPO()}


@pytest.mark.parametrize("kind", LOSSES)
def test_full_step_loss_sees_all_micro_batches(
    kind: str, base_config: preference.PreferenceConfig, tmp_path: Path
) -> None:
    cfg = replace(base_config, loss=(LOSSES[kind],), adapter=LoRAConfig(4))
    expected = single_process_result(replace(cfg, micro_batch_size=NUM_PAIRS), tmp_path / "one")
    assert single_process_result(cfg, tmp_path / "more").max_difference(expected) < 1e-5
    if kind != "kto":  # KTO compares with the next row, and packing reorders rows
        assert single_process_result(with_packing(cfg), tmp_path / "packed").max_difference(expected) < 1e-5


def two_rank_configs(base_config: preference.PreferenceConfig) -> dict[str, preference.PreferenceConfig]:
    """Configs for two ranks. One has three pairs in two micro-batches, the other two pairs and an empty batch.

    Several losses are summed in one run: an error in one changes the sum.
    """
    lora = replace(base_config, adapter=LoRAConfig(4))
    configs = {
        "tail": replace(lora, ld_alpha=0.5, reference=PrecomputedReference()),
        "dora": replace(base_config, **METHODS["dora"]),
    }
    configs |= {f"{kind}, packed": with_packing(replace(base_config, **METHODS[kind])) for kind in ("full", "qlora")}
    configs |= {"aot": replace(lora, loss=(AOT(), AOTUnpaired(), ORPO())), "kto": replace(lora, loss=(KTO(), BCO()))}
    configs |= {"marks": as_unpaired(replace(lora, loss=(KTO(), BCO(weight=0.5))))}
    configs |= {"full, cached": replace(base_config, reference=PrecomputedReference())}
    for parallel, weights in ((ParallelConfig(tp=2), Float8Config()), (ParallelConfig(cp=2), NF4Config())):
        name = "tensor" if parallel.tp > 1 else "context"
        configs |= {name: replace(with_packing(base_config), parallel=parallel)}
        configs |= {f"{name}, {weights.kind}": replace(lora, quantization=weights, parallel=parallel)}
        configs |= {f"{name}, kto": replace(lora, parallel=parallel, loss=(KTO(), DPO()))}
        configs |= {f"{name}, orpo": replace(lora, parallel=parallel, loss=(ORPO(), AOT()))}
    return configs


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_match_one_process(base_config: preference.PreferenceConfig, tmp_path: Path) -> None:
    cases = {name: replace(cfg, output_dir=str(tmp_path / name)) for name, cfg in two_rank_configs(base_config).items()}
    run_ranks(2, run_recipe, "preference", list(cases.values()), limit=600)
    differences = {
        name: RunResult.read(Path(cfg.output_dir)).max_difference(
            single_process_result(replace(cfg, parallel=ParallelConfig()), tmp_path / f"{name} alone")
        )
        for name, cfg in cases.items()
    }
    print("\n".join(f"{name:20} {value:.1e}" for name, value in differences.items()))
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.multi
def test_router_losses_on_two_ranks_match_one_process(base_config: preference.PreferenceConfig, tmp_path: Path) -> None:
    """The fifth pair leaves one rank without rows."""
    routed = replace(
        base_config,
        model=str(save(build(SPARSE), tmp_path / "sparse")),
        router_aux_loss_coef=0.5,
        router_z_loss_coef=0.01,
        micro_batch_size=1,
    )
    layouts = {"fsdp": ParallelConfig(), "cp": ParallelConfig(cp=2), "tp": ParallelConfig(tp=2)}
    cfgs = [replace(routed, parallel=layouts[name], output_dir=str(tmp_path / name)) for name in layouts]
    run_ranks(2, run_recipe, "preference", cfgs, limit=300)
    expected = single_process_result(routed, tmp_path / "one")
    assert len(expected.metrics["aux_loss"]) == 2
    for cfg in cfgs:
        assert RunResult.read(Path(cfg.output_dir)).max_difference(expected) < 1e-5, cfg.parallel
