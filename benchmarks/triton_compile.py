"""Compile every Triton kernel to machine code for NVIDIA and AMD GPUs, without one; report registers and spills.

    python benchmarks/triton_compile.py --table benchmarks/results/DATE-triton-compile.md
    python benchmarks/triton_compile.py --quick --json -  # what CI compiles
    python benchmarks/triton_compile.py --all             # 5,000 compilations, 20 CPU minutes
    python benchmarks/triton_compile.py --all --targets sm_90 --json sm_90.json  # one of nine targets
    python benchmarks/triton_compile.py --all --merge *.json --table FILE        # report of several runs
    PYTHONPATH=.venv/triton-3.6 python benchmarks/triton_compile.py --all  # with another version of Triton

Never set TRITON_INTERPRET: interpreted kernels are not compiled.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as compile_triton
from triton.errors import TritonError
from triton_launch_recorder import Launch, describe_versions
from triton_launches import unique_launches

from tunekit.env_info import describe_hardware

TARGETS = "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100"
WARP_SIZES = {"gfx942": 64}
# Constants that do not select code
BLOCK_SIZES = ("BLOCK_SIZE", "BYTES", "HEADS", "ROWS", "WIDTH", "BLOCKS", "EXPERTS", "COLUMNS", "INNER")
# GPUs on which a module is never called: `prefers_triton` in grouped_mm.py, `max_rows` in nf4_matmul_triton.py.
# grouped_mm_triton is not called on sm_90 either, but that is the target of the test with the oldest Triton.
UNUSED = {"grouped_mm_triton": {"sm_75", "sm_100", "gfx942"}, "nf4_matmul_triton": {"sm_75"}}
# Their code is similar to that of sm_90 and sm_120: quick runs skip the largest variants
SIMILAR_TARGETS = {"sm_80", "sm_86", "sm_89", "sm_100"}

COVERAGE = {
    "quick": "Variants with all pairs of dtypes and flags, with the largest block of all presets. Each is compiled\n"
    "for one target, in rotation, and the largest of each kernel for most targets (`--quick`, as in the tests).",
    "largest": "The variant of each kernel with the largest block, for all targets.",
    "variants": "Variants: dtypes and flags, with the largest block of all presets, each for all targets.",
    "merge": "The variant of each kernel with the largest block for all targets, and variants with all pairs of\n"
    "dtypes and flags for one target, in rotation: `--largest` and `--quick`, one run per target.",
    "all": "Variants: dtypes, flags, block sizes and integers that are 1 or multiples of 16, each for all targets.",
}


@dataclass(frozen=True)
class CompileResult:
    """Resources of one compiled launch; registers and spilled bytes are per thread."""

    kernel: str
    variant: str
    pointers: str
    target: str
    num_warps: int
    registers: int = 0
    spills: int = 0
    shared: int = 0
    max_load_bits: int = 0
    fma_instructions: int = 0  # fused multiply-add instructions
    mma_instructions: int = 0  # tensor core instructions
    flushes_subnormals: bool = False  # some instructions flush subnormal numbers to zero
    seconds: float = 0.0
    error: str = ""


def get_target(name: str) -> GPUTarget:
    if name.startswith("gfx"):
        return GPUTarget("hip", name, WARP_SIZES.get(name, 32))
    return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)


def compile_launch(launch: Launch, target: str) -> CompileResult:
    """Compile for one target. The result contains errors of the compiler."""
    start, log, errors = time.perf_counter(), io.StringIO(), io.StringIO()
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    names = launch.name, launch.variant, launch.pointers, target, launch.options["num_warps"]
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(errors):
            compiled = compile_triton(source, target=get_target(target), options=launch.options)
    except (TritonError, RuntimeError, AssertionError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        return CompileResult(*names, seconds=time.perf_counter() - start, error=reason)
    read_resources = read_amd_resources if target.startswith("gfx") else read_nvidia_resources
    seconds = time.perf_counter() - start
    return CompileResult(*names, *read_resources(compiled, log.getvalue()), seconds=seconds)


def read_nvidia_resources(compiled: CompiledKernel, log: str) -> tuple[int, int, int, int, int, int, bool]:
    """Fields of CompileResult, from the log of ptxas (TRITON_DUMP_PTXAS_LOG) and the PTX."""
    registers = re.search(r"Used (\d+) registers", log)
    assert registers, f"no register count in the log of ptxas: {log!r}"
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    max_load_bits = max((int(count or 1) * int(bits) for count, bits in loads), default=0)
    fma_instructions = len(re.findall(r"\bfma\.rn", compiled.asm["ptx"]))
    mma_instructions = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", compiled.asm["ptx"]))
    flushes_subnormals = ".ftz" in compiled.asm["ptx"]
    return (
        int(registers[1]),
        spills,
        compiled.metadata.shared,
        max_load_bits,
        fma_instructions,
        mma_instructions,
        flushes_subnormals,
    )


def read_amd_resources(compiled: CompiledKernel, log: str) -> tuple[int, int, int, int, int, int]:
    """Fields of CompileResult, from the assembly. Registers are vector registers; spills are scratch memory."""
    text = compiled.asm["amdgcn"]
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    scratch = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    assert registers and scratch, "no resource metadata in the assembly"
    loads = re.findall(r"(?:global|buffer)_load_(?:b|dword)(x?\d*)", text)
    widths = {"": 32, "x2": 64, "x3": 96, "x4": 128}
    max_load_bits = max((widths[n] if n in widths else int(n) for n in loads), default=0)
    fma_instructions, mma_instructions = (len(re.findall(rf"\b{name}", text)) for name in ("v_fma", "v_(?:mfma|wmma)"))
    return (
        int(registers[1]),
        int(scratch[1]),
        compiled.metadata.shared,
        max_load_bits,
        fma_instructions,
        mma_instructions,
    )


def select_largest_blocks(launches: list[Launch]) -> list[Launch]:
    """The launch with the largest blocks of each group that only differs in block sizes and alignment."""
    groups: dict[tuple[str, ...], list[Launch]] = {}
    for launch in launches:
        flags = [word for word in launch.variant.split() if word.partition("=")[0] not in BLOCK_SIZES]
        groups.setdefault((launch.name, *flags, launch.pointers), []).append(launch)
    return [max(group, key=count_block_elements) for group in groups.values()]


def is_used(launch: Launch, target: str) -> bool:
    return target not in UNUSED.get(launch.name.partition(".")[0], ())


def select_largest(launches: list[Launch]) -> list[Launch]:
    """The largest launch of each kernel."""
    return list({launch.name: launch for launch in sorted(launches, key=count_block_elements)}.values())


def get_pairs(launch: Launch, names: list[str]) -> set[tuple[tuple[str, str], ...]]:
    """All pairs of constants and dtypes of a launch, as two (name, value)."""
    values = {name: value for name, _, value in (word.partition("=") for word in launch.variant.split())}
    return set(combinations([("", launch.pointers), *((name, values.get(name, "")) for name in names)], 2))


def select_pairwise(launches: list[Launch], first: Launch) -> list[Launch]:
    """Launches of one kernel that cover each pair of flags and dtypes; `first` is one of them."""
    names = sorted({word.partition("=")[0] for launch in launches for word in launch.variant.split()})
    pairs = {launch.key: get_pairs(launch, names) for launch in launches}
    missing, selected = set().union(*pairs.values()) - pairs[first.key], [first]
    while missing:
        selected.append(max(launches, key=lambda launch: len(missing & pairs[launch.key])))
        missing -= pairs[selected[-1].key]
    return selected


def select_quick(launches: list[Launch], target: str, targets: list[str]) -> list[Launch]:
    """Variants with all pairs of flags, each for one of the targets, and the largest of each kernel for most."""
    largest = select_largest(launches)
    selected = [] if target in SIMILAR_TARGETS and len(targets) > 1 else largest.copy()
    variants = [v for first in largest for v in select_pairwise([x for x in launches if x.name == first.name], first)]
    for index, launch in enumerate(variants):
        used_targets = [name for name in targets if is_used(launch, name)]
        if used_targets and used_targets[index % len(used_targets)] == target:
            selected.append(launch)
    return list({launch.key: launch for launch in selected}.values())


def count_block_elements(launch: Launch) -> int:
    """Elements of one block of a launch."""
    num_elements = 1
    for word in launch.variant.split():
        name, _, value = word.partition("=")
        num_elements *= int(value) if name in BLOCK_SIZES else 1
    return num_elements


JOBS: list[tuple[Launch, str]] = []  # workers are forked, because kernels cannot be pickled


def run_job(index: int) -> CompileResult:
    return compile_launch(*JOBS[index])


def compile_all(targets: list[str], selection: str, processes: int) -> list[CompileResult]:
    """Compile the selected launches for all targets; results are in a fixed order."""
    for target in targets:
        launches = unique_launches(get_target(target).backend)
        if selection != "all":
            launches = select_largest_blocks(launches)
        if selection == "quick":
            launches = select_quick(launches, target, targets)
        if selection == "largest":
            launches = select_largest(launches)
        JOBS.extend((launch, target) for launch in launches if is_used(launch, target))
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(processes, context, initializer=prepare_worker, initargs=(cache,)) as pool,
    ):
        return list(pool.map(run_job, range(len(JOBS)), chunksize=4))


def prepare_worker(cache: str) -> None:
    """Use an empty cache: ptxas writes no log for a cached kernel."""
    os.environ.update(TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1")


def read_results(files: list[str]) -> list[CompileResult]:
    """Results of several runs with this version of Triton, sorted by kernel, without duplicates."""
    merged: Counter[CompileResult] = Counter()
    for file in files:
        entries = json.loads(Path(file).read_text("utf-8"))
        assert {entry.pop("triton") for entry in entries} == {triton.__version__}, (
            "results of another version of Triton"
        )
        merged |= Counter(CompileResult(**entry | {"seconds": 0.0}) for entry in entries)
    return sorted(merged.elements(), key=lambda result: result.kernel)


def format_table(results: list[CompileResult], targets: list[str]) -> str:
    """A row for each kernel, a column for each target: ranges over all variants."""
    kernels = list(dict.fromkeys(result.kernel for result in results))
    lines = [f"| kernel | variants | {' | '.join(targets)} |", f"|---|--:|{'--:|' * len(targets)}"]
    for kernel in kernels:
        count = max(sum(r.kernel == kernel and r.target == target for r in results) for target in targets)
        cells = [format_cell([r for r in results if (r.kernel, r.target) == (kernel, target)]) for target in targets]
        lines.append(f"| `{kernel.replace('_triton', '')}` | {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_cell(results: list[CompileResult]) -> str:
    if not results:
        return "not used"
    if failed := sum(bool(r.error) for r in results):
        return f"{failed} failed"
    registers, spills = format_range(r.registers for r in results), max(r.spills for r in results)
    shared = max(r.shared for r in results)
    return f"{registers} / {spills} / {shared}"


def format_range(numbers: Iterable[int]) -> str:
    low, *_, high = sorted([*numbers] * 2)
    return str(low) if low == high else f"{low}-{high}"


def describe_command(args: argparse.Namespace) -> str:
    merge = [*(["--all"] if args.selection == "all" else []), "--merge", "FILES", "--table", "FILE"]
    return shlex.join(["python", "benchmarks/triton_compile.py", *(merge if args.merge else sys.argv[1:])])


def format_report(results: list[CompileResult], targets: list[str], selection: str, command: str) -> str:
    spilled = [r for r in results if r.spills]
    spills = sorted({(r.kernel, r.variant, r.pointers, r.target, r.spills) for r in spilled}, key=lambda r: -r[4])
    failures = sum(bool(result.error) for result in results)
    lines = [f"- {size} B: `{kernel}` {variant} ({types}), {target}" for kernel, variant, types, target, size in spills]
    return f"""# Triton kernels, compiled for {len(targets)} GPUs

{date.today()}, {describe_versions()}, Python {platform.python_version()},
{describe_hardware(torch.device("cpu"))}, no GPU:
Triton's compiler with its own ptxas and LLVM. The kernels were compiled, not run.
`{command}`

{COVERAGE[selection]}
Cells: registers per thread (minimum-maximum) / spilled bytes per thread (maximum) / bytes of shared memory per block
(maximum). "variants": maximum over targets.
{len(results)} compilations, {failures} failures.

{format_table(results, targets)}

{"Largest spills:" if lines else "No kernel spills."}
{chr(10).join(lines[:20])}
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), help="names such as sm_90,gfx942")
    selections = parser.add_mutually_exclusive_group()
    options: dict[str, Any] = {"dest": "selection", "action": "store_const"}
    selections.add_argument("--quick", help="pairs of flags, each for one target", const="quick", **options)
    selections.add_argument("--largest", help="the largest variant of each kernel", const="largest", **options)
    selections.add_argument("--all", help="each block size and alignment", const="all", **options)
    parser.add_argument("--merge", nargs="+", metavar="JSON", help="results of earlier runs; compile nothing")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", help="write all results here; -: to standard output")
    parser.add_argument("--table", help="write a Markdown report here")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("triton_compile.py: TRITON_INTERPRET is set. Unset it: interpreted kernels are not compiled.")
    targets = args.targets.split(",")
    selection = args.selection or ("merge" if args.merge else "variants")
    results = read_results(args.merge) if args.merge else compile_all(targets, selection, args.processes)
    if args.json:
        text = json.dumps([asdict(result) | {"triton": triton.__version__} for result in results], indent=0)
        sys.stdout.write(text) if args.json == "-" else Path(args.json).write_text(text, "utf-8")
    if args.table:
        Path(args.table).write_text(format_report(results, targets, selection, describe_command(args)), "utf-8")
    if errors := [result for result in results if result.error]:
        sys.exit(f"{len(errors)} of {len(results)} failed, the first: {errors[0]}")


if __name__ == "__main__":
    main()
