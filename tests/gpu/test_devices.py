"""Dispatch on devices that are not present: the table of capabilities, and everything that reads it."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tunekit import devices
from tunekit.cli import main as cli
from tunekit.cli import recipe_loader
from tunekit.devices import ACCELERATORS, TABLE, Capabilities, Device, choose_type, find_row
from tunekit.distributed.context import DistributedContext
from tunekit.distributed.parallel_dims import REPLICATED, ParallelConfig
from tunekit.errors import UserError
from tunekit.memory.config import MemoryConfig
from tunekit.models.compile import check_compile
from tunekit.models.precision import PrecisionConfig
from tunekit.recipes import sft

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
DEVICES = {
    "cpu": Device("cpu"),
    "P100": Device("cuda", (6, 0)),
    "V100": Device("cuda", (7, 0)),
    "T4": Device("cuda", (7, 5)),
    "A100": Device("cuda", (8, 0)),
    "RTX 3090": Device("cuda", (8, 6)),
    "L4": Device("cuda", (8, 9)),
    "H100": Device("cuda", (9, 0)),
    "B200": Device("cuda", (10, 0)),
    "RTX 5090": Device("cuda", (12, 0)),
    "MI300X": Device("cuda", arch="gfx942:sramecc+:xnack-"),
    "RX 7900": Device("cuda", arch="gfx1100"),
    "Arc": Device("xpu"),
    "M3": Device("mps"),
    "meta": Device("meta"),
}
# What is chosen: the dtype of precision auto, the attention kernel for packed bf16 rows, that with sinks, kernels of
# our own, those for NF4, fused AdamW, torch.compile.
CHOICES = {
    "cpu": ("bf16", "native", "native", "cpp", "cpp", True, True),
    "P100": ("fp32", "sdpa", "sdpa", "torch", "torch", True, False),
    "V100": ("fp32", "sdpa", "sdpa", "torch", "torch", True, False),
    "T4": ("fp32", "sdpa", "sdpa", "triton", "triton", True, True),
    "A100": ("bf16", "flash", "flash", "triton", "triton", True, True),
    "RTX 3090": ("bf16", "flash", "flash", "triton", "triton", True, True),
    "L4": ("bf16", "flash", "flash", "triton", "triton", True, True),
    "H100": ("bf16", "flash", "flash", "triton", "triton", True, True),
    "B200": ("bf16", "flash", "flash", "triton", "triton", True, True),
    "RTX 5090": ("bf16", "flash", "flash", "triton", "triton", True, True),
    "MI300X": ("bf16", "flash", "flex", "triton", "triton", True, True),
    "RX 7900": ("bf16", "flash", "flex", "triton", "triton", True, True),
    "Arc": ("bf16", "sdpa", "sdpa", "torch", "torch", True, True),
    "M3": ("bf16", "sdpa", "sdpa", "torch", "torch", True, False),
    "meta": ("fp32", "sdpa", "sdpa", "torch", "torch", False, False),
}


def attention(row: Capabilities, sinks: bool) -> str:
    """The kernel for packed rows."""
    if row.name == "cpu":
        return "native"
    if row.flash:
        return "flash" if row.flash_lse or not sinks else "flex"
    return "sdpa"


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_gets_what_it_can_do(name: str) -> None:
    row = find_row(DEVICES[name])
    kernels = "cpp" if row.name == "cpu" else "triton" if row.triton else "torch"
    dtype = "bf16" if row.bf16 else "fp32"
    kinds = attention(row, sinks=False), attention(row, sinks=True)
    assert (dtype, *kinds, kernels, row.nf4, row.fused_adamw, row.compile) == CHOICES[name]


def test_rows_do_not_contradict_themselves() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert row.nf4 != "triton" or row.triton, row.name
        assert row.flash or not row.flash_lse, row.name
        assert row.own_memory or not row.pinned_memory, row.name
        assert row.tested == (row.name in {"cpu", "cuda"}), "a row is tested once docs/gpus.md says on which device"


def test_generations_of_amd_gpus() -> None:
    assert find_row(Device("cuda", arch="gfx90a")).name == "rocm-cdna"
    assert find_row(DEVICES["RX 7900"]).name == "rocm-rdna"


@pytest.mark.parametrize(
    ("present", "chosen"),
    [((), "cpu"), (("mps",), "mps"), (("xpu", "mps"), "xpu"), (("cuda", "xpu", "mps"), "cuda")],
)
def test_auto_picks_the_first_type_that_torch_offers(present: tuple[str, ...], chosen: str) -> None:
    counts = {kind: int(kind in present) for kind in ACCELERATORS}
    assert choose_type("auto", counts) == chosen and choose_type("cpu", counts) == "cpu"
    for kind in ACCELERATORS:
        if kind in present:
            assert choose_type(kind, counts) == kind
        else:
            with pytest.raises(UserError, match=rf"device: .* no device of type {kind}"):
                choose_type(kind, counts)


def test_this_machine_is_described() -> None:
    assert set(devices.count_devices()) == set(ACCELERATORS)
    assert (
        devices.device_capabilities(CPU).name == "cpu"
        and devices.device_capabilities(torch.device("meta")).name == "other"
    )


def test_backends_of_processes() -> None:
    backends = {}
    for device in DEVICES.values():
        if find_row(device).backend is not None:
            backends[device.type] = devices.backend_of(device.type, find_row(device))
    assert backends == {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
    with pytest.raises(UserError, match="several processes"):
        ParallelConfig().check("mps", 2)
    ParallelConfig().check("mps", 1)
    ParallelConfig(cpu_offload=True).check("cuda", 2)
    for count in (1, 2):
        with pytest.raises(UserError, match="parallel.cpu_offload"):
            ParallelConfig(cpu_offload=True).check("cpu", count)


@pytest.mark.parametrize(
    ("parallel", "count"), [(ParallelConfig(cpu_offload=True), 1), (ParallelConfig(cpu_offload=True, tp=2), 2)]
)
def test_weights_that_no_devices_share_cannot_wait_on_the_host(parallel: ParallelConfig, count: int) -> None:
    """It used to change nothing, without a word."""
    with pytest.raises(UserError, match="parallel.cpu_offload: .*sharded"):
        parallel.check("cuda", count)
    parallel.check("cuda", 2 * count)
    with pytest.raises(UserError, match="parallel.cpu_offload: device cpu"):
        DistributedContext(0, "cpu", ParallelConfig(cpu_offload=True))


@pytest.mark.parametrize(
    ("parallel", "count"),
    [(REPLICATED, 2), (ParallelConfig(dp_replicate=2), 2), (ParallelConfig(dp_replicate=None, dp_shard=1, tp=2), 4)],
)
def test_whole_copies_of_a_model_that_is_not_trained_cannot_wait_on_the_host(
    parallel: ParallelConfig, count: int
) -> None:
    """FSDP leaves them alone, so that all weights used to stay on the device, without a word."""
    offloaded = replace(parallel, cpu_offload=True)
    offloaded.check("cuda", count)  # training: gradients are averaged over the copies by FSDP
    with pytest.raises(UserError, match=rf"parallel.cpu_offload: .* parallel.dp_shard={count // parallel.tp}"):
        offloaded.check_inference(count)
    parallel.check_inference(count)
    replace(offloaded, dp_replicate=1, dp_shard=count // parallel.tp).check_inference(count)
    offloaded.check_inference(1)  # a process group of one rank shards too


def test_only_untested_devices_are_warned_about() -> None:
    for name in ("cpu", "H100"):
        assert devices.untested_warning(find_row(DEVICES[name])) is None
    for name in ("T4", "MI300X", "Arc", "M3"):
        line = devices.untested_warning(find_row(DEVICES[name]))
        assert line is not None and find_row(DEVICES[name]).name in line and "\n" not in line


def test_what_a_device_lacks_is_refused_before_weights_are_read() -> None:
    for choice, key in (
        (MemoryConfig(activation_offloading=True), "memory.activation_offloading"),
        (PrecisionConfig("tf32"), "precision.compute_dtype"),
    ):
        with pytest.raises(UserError, match=key):
            choice.check(CPU)
    with pytest.raises(UserError, match="compile"):
        check_compile(torch.device("meta"))
    for name in ("A100", "RTX 5090"):
        devices.check_tf32(name, find_row(DEVICES[name]))
    for name in ("cpu", "T4", "V100", "MI300X", "Arc", "M3"):
        with pytest.raises(UserError, match="8.0"):
            devices.check_tf32(name, find_row(DEVICES[name]))


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_tf32_is_refused_by_the_check_of_a_config(device: str) -> None:
    with pytest.raises(UserError, match="precision.compute_dtype"):
        recipe_loader.load_checked_config(
            sft, "nano/tools_lora", ["precision.compute_dtype=tf32", f"device={device}"], []
        )
    recipe_loader.load_checked_config(sft, "nano/tools_lora", ["precision.compute_dtype=tf32", "device=cuda"], [])


@pytest.mark.parametrize(
    "override",
    ["device=gpu", "device=cuda:1", "deterministic=maybe", "parallel.cpu_offload=true",
     "memory.activation_offloading=true",
     "precision.compute_dtype=fp8", "precision.compute_dtype=tf32"],
)  # fmt: skip
def test_mistakes_of_device_options_name_the_key(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "nano/tools_lora", override]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and f"{override.partition('=')[0]}: " in error


def test_a_device_that_is_not_present_is_an_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["sft", "nano/tools_lora", "device=cuda", f"output_dir={tmp_path / 'run'}"]
    assert cli.main(["validate", "nano/tools_lora", "device=cuda"]) == 0, "it may be for another machine"
    assert cli.main(["run", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: device: ") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("word", "variable"), [("cuda:1", "CUDA_VISIBLE_DEVICES=1"), ("xpu:0", "ZE_AFFINITY_MASK=0")])
def test_a_device_with_an_index_names_the_variable(word: str, variable: str) -> None:
    with pytest.raises(UserError, match=variable):
        recipe_loader.load_checked_config(sft, "nano/tools_lora", [f"device={word}"], [])


def test_a_deterministic_run_sets_torch_and_restores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = devices.read_numerics()
    with DistributedContext(0, "cpu", deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not devices.read_numerics().fill_memory
        torch.set_float32_matmul_precision("high")
        with devices.full_fp32_matmuls():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    assert devices.read_numerics() == before


def test_cublas_is_configured_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with DistributedContext(0, "cpu", deterministic=True):
        assert devices.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_generators_are_restored() -> None:
    torch.manual_seed(1)
    with devices.fork_rng(CPU):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), first) and devices.get_rng_state(CPU) is None


# Files that may name CUDA: the table, and users of what torch has for CUDA alone (graphs, cuDNN, NCCL's recorder).
NAMING = {
    "tunekit/cli/parsers.py",
    "tunekit/config/build.py",
    "tunekit/devices.py",
    "tunekit/env_info.py",
    "tunekit/models/decode.py",
    "tunekit/distributed/attention_setup.py",
    "tunekit/distributed/context.py",
    "tunekit/training/profiler.py",
}
GPU_PACKAGES = (
    "tunekit/plan/",
    "tunekit/selftest/",
    "tunekit/importers/",
)  # kinds and checks of GPUs, keys of other trainers


def cuda_names(path: Path) -> list[int]:
    """Lines that ask for CUDA themselves: the word as a value, `torch.cuda`, `is_cuda`."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and node.value == "cuda":
            lines.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"):
            lines.append(node.lineno)
    return lines


def test_nothing_but_the_table_asks_for_cuda() -> None:
    files = [path for folder in ("tunekit", "recipes") for path in (ROOT / folder).rglob("*.py")]
    names = {path.relative_to(ROOT).as_posix(): cuda_names(path) for path in files}
    names = {name: lines for name, lines in names.items() if lines and not name.startswith(GPU_PACKAGES)}
    assert set(names) <= NAMING, names
