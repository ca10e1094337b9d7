"""Compile every Triton kernel to machine code for NVIDIA and AMD GPUs, without one; report registers and spills.

    python benchmarks/triton_compile.py --table benchmarks/results/DATE-triton-compile.md
    python benchmarks/triton_compile.py --quick --json -  # what CI compiles
    python benchmarks/triton_compile.py --all             # 5,000 compilations, 20 CPU minutes
    python benchmarks/triton_compile.py --all --targets sm_90 --json sm_90.json  # one of nine parts
    python benchmarks/triton_compile.py --all --merge *.json --table FILE        # report of all parts
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
# GPUs on which a module is never called: `prefers_triton` in grouped_mm.py, `max_rows` in nf4_matmul_triton.py. Nor is
# grouped_mm_triton on sm_90, which the oldest Triton compiles for.
UNUSED = {"grouped_mm_triton": {"sm_75", "sm_100", "gfx942"}, "nf4_matmul_triton": {"sm_75"}}
# Their code is much like that of sm_90 and sm_120: quick runs compile a share only
SIMILAR = {"sm_80", "sm_86", "sm_89", "sm_100"}

COVERAGE = {
    "quick": "Variants with all pairs of dtypes and flags, with the largest block that the presets lead to. Each is\n"
    "compiled for one target, in turn, and the largest of each kernel for most (`--quick`, as in the tests).",
    "largest": "Of each kernel, the variant with the largest block, for all targets.",
    "variants": "Variants: dtypes and flags, with the largest block that the presets lead to, each for all targets.",
    "merge": "Of each kernel, the variant with the largest block for all targets, and variants with all pairs of\n"
    "dtypes and flags for one target, in turn: `--largest` and `--quick`, one target after the other.",
    "all": "Variants: dtypes, flags, block sizes and integers that are 1 or multiples of 16, each for all targets.",
}


@dataclass(frozen=True)
class CompileResult:
    """Resources of one compiled launch; registers and spilled bytes of one thread."""

    kernel: str
    variant: str
    pointers: str
    target: str
    num_warps: int
    registers: int = 0
    spills: int = 0
    shared: int = 0
    widest_load: int = 0  # bits
    multiply_adds: int = 0  # instructions that multiply and add with one rounding
    matrix_products: int = 0  # instructions for tensor cores
    flushes: bool = False  # some instructions take subnormal numbers for zeros
    seconds: float = 0.0
    error: str = ""


def get_target(name: str) -> GPUTarget:
    if name.startswith("gfx"):
        return GPUTarget("hip", name, WARP_SIZES.get(name, 32))
    return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)


def compile_launch(launch: Launch, target: str) -> CompileResult:
    """Machine code for one target. Errors of the compiler become part of the result."""
    start, log, errors = time.perf_counter(), io.StringIO(), io.StringIO()
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    names = launch.name, launch.variant, launch.pointers, target, launch.options["num_warps"]
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(errors):
            compiled = compile_triton(source, target=get_target(target), options=launch.options)
    except (TritonError, RuntimeError, AssertionError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        return CompileResult(*names, seconds=time.perf_counter() - start, error=reason)
    read = read_amd_resources if target.startswith("gfx") else read_nvidia_resources
    seconds = time.perf_counter() - start
    return CompileResult(*names, *read(compiled, log.getvalue()), seconds=seconds)


def read_nvidia_resources(compiled: CompiledKernel, log: str) -> tuple[int, int, int, int, int, int, bool]:
    """From the log of ptxas, which Triton prints with TRITON_DUMP_PTXAS_LOG, and from the PTX."""
    registers = re.search(r"Used (\d+) registers", log)
    assert registers, f"no register count in the log of ptxas: {log!r}"
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    widest = max((int(count or 1) * int(bits) for count, bits in loads), default=0)
    multiply_adds = len(re.findall(r"\bfma\.rn", compiled.asm["ptx"]))
    products = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", compiled.asm["ptx"]))
    flushes = ".ftz" in compiled.asm["ptx"]
    return int(registers[1]), spills, compiled.metadata.shared, widest, multiply_adds, products, flushes


def read_amd_resources(compiled: CompiledKernel, log: str) -> tuple[int, int, int, int, int, int]:
    """From the metadata in the assembly. Registers are vector registers; spills are bytes of scratch memory."""
    text = compiled.asm["amdgcn"]
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    scratch = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    assert registers and scratch, "no resource metadata in the assembly"
    loads = re.findall(r"(?:global|buffer)_load_(?:b|dword)(x?\d*)", text)
    widths = {"": 32, "x2": 64, "x3": 96, "x4": 128}
    widest = max((widths[n] if n in widths else int(n) for n in loads), default=0)
    multiply_adds, products = (len(re.findall(rf"\b{name}", text)) for name in ("v_fma", "v_(?:mfma|wmma)"))
    return int(registers[1]), int(scratch[1]), compiled.metadata.shared, widest, multiply_adds, products


def pick_largest(launches: list[Launch]) -> list[Launch]:
    """The launch with the largest blocks among those that differ in block sizes and alignment only."""
    groups: dict[tuple[str, ...], list[Launch]] = {}
    for launch in launches:
        flags = [word for word in launch.variant.split() if word.partition("=")[0] not in BLOCK_SIZES]
        groups.setdefault((launch.name, *flags, launch.pointers), []).append(launch)
    return [max(group, key=get_block_numbers) for group in groups.values()]


def is_used(launch: Launch, target: str) -> bool:
    return target not in UNUSED.get(launch.name.partition(".")[0], ())


def find_widest(launches: list[Launch]) -> list[Launch]:
    """The largest launch of each kernel."""
    return list({launch.name: launch for launch in sorted(launches, key=get_block_numbers)}.values())


def get_pairs(launch: Launch, names: list[str]) -> set[tuple[tuple[str, str], ...]]:
    """All pairs of constants and dtypes of a launch: (name, value) twice."""
    values = {name: value for name, _, value in (word.partition("=") for word in launch.variant.split())}
    return set(combinations([("", launch.pointers), *((name, values.get(name, "")) for name in names)], 2))


def pick_pairs(launches: list[Launch], picked: Launch) -> list[Launch]:
    """Launches of one kernel that have, with one that is picked already, each pair of flags and dtypes of all."""
    names = sorted({word.partition("=")[0] for launch in launches for word in launch.variant.split()})
    pairs = {launch.key: get_pairs(launch, names) for launch in launches}
    missing, chosen = set().union(*pairs.values()) - pairs[picked.key], [picked]
    while missing:
        chosen.append(max(launches, key=lambda launch: len(missing & pairs[launch.key])))
        missing -= pairs[chosen[-1].key]
    return chosen


def pick_share(launches: list[Launch], target: str, targets: list[str]) -> list[Launch]:
    """Variants with all pairs of flags, each for one of the targets, and the largest of each kernel for most."""
    widest = find_widest(launches)
    share = [] if target in SIMILAR and len(targets) > 1 else widest.copy()
    variants = [v for kernel in widest for v in pick_pairs([x for x in launches if x.name == kernel.name], kernel)]
    for index, launch in enumerate(variants):
        turns = [name for name in targets if is_used(launch, name)]
        if turns and turns[index % len(turns)] == target:
            share.append(launch)
    return list({launch.key: launch for launch in share}.values())


def get_block_numbers(launch: Launch) -> int:
    """Numbers of one block of a launch."""
    numbers = 1
    for word in launch.variant.split():
        name, _, value = word.partition("=")
        numbers *= int(value) if name in BLOCK_SIZES else 1
    return numbers


JOBS: list[tuple[Launch, str]] = []  # workers are forked: kernels need not be pickled


def run_job(index: int) -> CompileResult:
    return compile_launch(*JOBS[index])


def compile_all(targets: list[str], form: str, processes: int) -> list[CompileResult]:
    """Results of launches for some targets, in a fixed order."""
    for target in targets:
        launches = unique_launches(get_target(target).backend)
        if form != "all":
            launches = pick_largest(launches)
        if form == "quick":
            launches = pick_share(launches, target, targets)
        if form == "largest":
            launches = find_widest(launches)
        JOBS.extend((launch, target) for launch in launches if is_used(launch, target))
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(processes, context, initializer=prepare_worker, initargs=(cache,)) as pool,
    ):
        return list(pool.map(run_job, range(len(JOBS)), chunksize=4))


def prepare_worker(cache: str) -> None:
    """An empty cache: ptxas writes no log for a kernel that it finds in the cache."""
    os.environ.update(TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1")


def read_results(files: list[str]) -> list[CompileResult]:
    """Results of several runs with this version of Triton, by kernel. Results in more than one file count once."""
    merged: Counter[CompileResult] = Counter()
    for file in files:
        entries = json.loads(Path(file).read_text("utf-8"))
        assert {entry.pop("triton") for entry in entries} == {triton.__version__}, "results of another Triton"
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
    merge = [*(["--all"] if args.form == "all" else []), "--merge", "FILES", "--table", "FILE"]
    return shlex.join(["python", "benchmarks/triton_compile.py", *(merge if args.merge else sys.argv[1:])])


def format_report(results: list[CompileResult], targets: list[str], form: str, command: str) -> str:
    spilled = [r for r in results if r.spills]
    spills = sorted({(r.kernel, r.variant, r.pointers, r.target, r.spills) for r in spilled}, key=lambda r: -r[4])
    failures = sum(bool(result.error) for result in results)
    lines = [f"- {size} B: `{kernel}` {variant} ({types}), {target}" for kernel, variant, types, target, size in spills]
    return f"""# Triton kernels, compiled for {len(targets)} GPUs

{date.today()}, {describe_versions()}, Python {platform.python_version()},
{describe_hardware(torch.device("cpu"))}, no GPU:
Triton's compiler with its own ptxas and LLVM. Nothing on this page has run on a GPU.
`{command}`

{COVERAGE[form]}
A cell is registers of a thread (lowest and highest) / bytes that a thread spills (most) / bytes of shared memory of a
block (most); "variants" is the most of one target.
{len(results)} compilations, {failures} failures.

{format_table(results, targets)}

{"Spills, the worst:" if lines else "No kernel spills."}
{chr(10).join(lines[:20])}
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), help="names such as sm_90,gfx942")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--quick", dest="form", action="store_const", const="quick", help="pairs of flags, for one target"
    )
    forms.add_argument(
        "--largest", dest="form", action="store_const", const="largest", help="the largest of each kernel"
    )
    forms.add_argument("--all", dest="form", action="store_const", const="all", help="each block size and alignment")
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
    form = args.form or ("merge" if args.merge else "variants")
    results = read_results(args.merge) if args.merge else compile_all(targets, form, args.processes)
    if args.json:
        text = json.dumps([asdict(result) | {"triton": triton.__version__} for result in results], indent=0)
        sys.stdout.write(text) if args.json == "-" else Path(args.json).write_text(text, "utf-8")
    if args.table:
        Path(args.table).write_text(format_report(results, targets, form, describe_command(args)), "utf-8")
    if errors := [result for result in results if result.error]:
        sys.exit(f"{len(errors)} of {len(results)} failed, the first: {errors[0]}")


if __name__ == "__main__":
    main()
