"""Preference on any layout: the same steps on one process and on two, packed or padded, whatever is trained."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import FP32, build, save
from tests.layout.test_layouts import DENSE
from tests.parallel.ranks import on
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

PAIRS, HELD, LENGTH = 7, 3, 40
FIGURES = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "logps/rejected", "entropy")
ADAPTED: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": LoRAConfig(4)},
    "dora": {"adapter": DoRAConfig(4)},
    "qlora": {"adapter": LoRAConfig(4), "quantization": NF4Config()},
}


@dataclass(frozen=True)
class Ended:
    """Figures of every step, and the tensors that a run has left."""

    figures: dict[str, list[float]]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, out: Path) -> "Ended":
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line or "eval/loss" in line]
        names = dict.fromkeys(name for line in steps for name in line if name in FIGURES or "eval/loss" in name)
        figures = {name: [line[name] for line in steps if name in line] for name in names}
        files = sorted((out / "final").glob("*.safetensors"))
        return cls(figures, {name: tensor for file in files for name, tensor in load_file(file).items()})

    def apart(self, other: "Ended") -> float:
        """The largest difference of a figure or a number, of the largest of its kind.

        A divergence is a difference of log-probabilities, and has their last bits.
        """
        assert self.figures.keys() == other.figures.keys() and self.tensors.keys() == other.tensors.keys()
        kinds = {name: other.figures["logps/rejected"] if name.endswith("kl") else [] for name in self.figures}
        pairs = [
            (torch.tensor(values + kinds[name]), torch.tensor(other.figures[name] + kinds[name]))
            for name, values in self.figures.items()
        ]
        pairs += [(self.tensors[name].float(), other.tensors[name].float()) for name in self.tensors]
        return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> preference.PreferenceConfig:
    """Three steps, each of all rows, so that packed rows make the same steps."""
    folder = tmp_path_factory.mktemp("preference")
    draw = torch.Generator().manual_seed(5)

    def words(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (1,), generator=draw))
        return " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (count,), generator=draw))

    lines = []
    for i in range(PAIRS + HELD):
        row = {"prompt": words(1, 9) + " ", "chosen": words(1, 11), "rejected": words(1, 11), "label": i % 3 > 0}
        lines.append(json.dumps(row | {"completion": row["chosen"]}) + "\n")
    source, held = folder / "rows.jsonl", folder / "held.jsonl"
    source.write_text("".join(lines[:PAIRS]))
    held.write_text("".join(lines[PAIRS:]))
    return preference.PreferenceConfig(
        model=str(save(build(DENSE), folder / "model")),
        data=Pairs(str(source), max_length=LENGTH),
        eval_data=Pairs(str(held), max_length=LENGTH),
        output_dir=str(folder / "out"),
        optimizer=AdamWConfig(lr=0.003, eps=0.1),
        lr_scheduler=ConstantLRConfig(),
        precision=FP32,
        device="cpu",
        global_batch_size=64,
        epochs=3,
        eval_every=2,
    )


def packed(cfg: preference.PreferenceConfig) -> preference.PreferenceConfig:
    # What is packed has room for two rows of this length, and prompts are written once.
    return replace(cfg, data=replace(cfg.data, packing=True), eval_data=replace(cfg.eval_data, packing=True))


def marked(cfg: preference.PreferenceConfig) -> preference.PreferenceConfig:
    data, held = (UnpairedPreferenceDataset(rows.source, max_length=LENGTH) for rows in (cfg.data, cfg.eval_data))
    return replace(cfg, data=data, eval_data=held)


ENDED: dict[str, Ended] = {}


def alone(cfg: preference.PreferenceConfig, folder: Path) -> Ended:
    """What a run on this process comes to, computed once."""
    key = repr(replace(cfg, output_dir=""))
    if key not in ENDED:
        preference.main(replace(cfg, output_dir=str(folder)))
        ENDED[key] = Ended.of(folder)
    return ENDED[key]


def ran(cfgs: list[preference.PreferenceConfig]) -> None:
    torch.set_num_threads(1)
    for cfg in cfgs:
        preference.main(cfg)


@pytest.mark.parametrize("kind", ADAPTED)
def test_packed_and_padded_and_in_any_micro_batches(
    kind: str, base: preference.PreferenceConfig, tmp_path: Path
) -> None:
    cfg = replace(base, **ADAPTED[kind])
    wanted = alone(cfg, tmp_path / "one")
    assert alone(packed(replace(cfg, micro_batch_size=2)), tmp_path / "packed").apart(wanted) < 1e-5
    assert wanted.figures["loss"][0] == pytest.approx(0.6931472, rel=1e-6)
    assert wanted.figures["loss"][-1] < 0.69


@pytest.mark.parametrize(("kind", "ways"), [
    ("lora", (DisableAdapterReference(), CopiedReference(), PrecomputedReference())),
    ("qlora", (DisableAdapterReference(), CopiedReference())),
    ("full", (CopiedReference(), PrecomputedReference())),
])  # fmt: skip
def test_every_reference_is_the_same(kind: str, ways: tuple, base: preference.PreferenceConfig, tmp_path: Path) -> None:
    cfg = packed(replace(base, micro_batch_size=2, **ADAPTED[kind]))
    wanted = alone(cfg, tmp_path / "auto")
    for way in ways:
        found = alone(replace(cfg, reference=way), tmp_path / type(way).__name__)
        assert found.apart(wanted) < 1e-6, way


LOSSES = {"aot": AOT(), "aot_unpaired": AOTUnpaired(), "kto": KTO(), "bco": BCO(), "orpo": ORPO()}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_of_a_whole_step_sees_all_micro_batches(
    kind: str, base: preference.PreferenceConfig, tmp_path: Path
) -> None:
    cfg = replace(base, loss=(LOSSES[kind],), adapter=LoRAConfig(4))
    wanted = alone(replace(cfg, micro_batch_size=PAIRS), tmp_path / "one")
    assert alone(replace(cfg, micro_batch_size=2), tmp_path / "more").apart(wanted) < 1e-5
    if kind != "kto":  # packing puts rows in another order, and so another one is the next
        assert alone(packed(cfg), tmp_path / "packed").apart(wanted) < 1e-5


def two(base: preference.PreferenceConfig) -> dict[str, preference.PreferenceConfig]:
    """On each of two ranks some rows, or a part of each row or layer. Their numbers are odd, so one goes empty."""
    lora = replace(base, adapter=LoRAConfig(4))
    found = {kind: replace(base, **more) for kind, more in ADAPTED.items()}
    found |= {f"{kind}, packed": packed(replace(base, **more)) for kind, more in ADAPTED.items()}
    found |= {kind: replace(lora, loss=(loss,)) for kind, loss in LOSSES.items()}
    found |= {"marks": marked(replace(lora, loss=(KTO(), BCO(weight=0.5))))}
    found |= {"cached": replace(lora, reference=PrecomputedReference()), "tail": replace(lora, ld_alpha=0.5)}
    found |= {"full, cached": replace(base, reference=PrecomputedReference())}
    for way in (ParallelConfig(tp=2), ParallelConfig(cp=2)):
        name = "tensor" if way.tp > 1 else "context"
        found |= {name: replace(packed(base), parallel=way), f"{name}, lora": replace(lora, parallel=way)}
        found |= {f"{name}, qlora": replace(lora, quantization=NF4Config(), parallel=way)}
        found |= {f"{name}, float8": replace(lora, quantization=Float8Config(), parallel=way)}
        found |= {f"{name}, kto": replace(lora, parallel=way, loss=(KTO(), DPO()))}
        found |= {f"{name}, orpo": replace(lora, parallel=way, loss=(ORPO(), AOT()))}
    return found


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks(base: preference.PreferenceConfig, tmp_path: Path) -> None:
    cases = {name: replace(cfg, output_dir=str(tmp_path / name)) for name, cfg in two(base).items()}
    on(2, ran, list(cases.values()))
    apart = {
        name: Ended.of(Path(cfg.output_dir)).apart(
            alone(replace(cfg, parallel=ParallelConfig()), tmp_path / f"{name} alone")
        )
        for name, cfg in cases.items()
    }
    print("\n".join(f"{name:20} {value:.1e}" for name, value in apart.items()))
    assert max(apart.values()) < 1e-5, apart
