"""Integer overflow in the addresses and masks of Triton kernels, proved from their IR for given launches.

A launch fixes the integer arguments and the grid, which bound every integer in the Triton IR. An addition, product or
shift whose exact result does not fit its type is an overflow. Overflows that no address and no mask depends on are
ignored: kernels also do arithmetic on bits of floats.

Assumptions about values that a launch does not fix: loaded 64-bit integers are token ids that fit 32 bits. Loaded
32-bit integers are row counts (offsets of experts), as are sums and scans over a block: 0 to 2^30. The operands of such
sums are not checked.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton_launch_recorder import Launch

TARGET = GPUTarget("cuda", 80, 32)
RESULT = re.compile(r"^\s*(%[\w.]+)(?::\d+)? = \"?([\w.]+)\"?(.*)$")
REGION = re.compile(r"^\s*(%[\w.]+) = \"tt\.(?:reduce|scan)\"")  # the type of the result is on a later line
ROW_LIMIT = 2**30
LOOP = re.compile(r"scf\.for (%[\w.]+) = (%[\w.]+) to (%[\w.]+) step")
OPERAND = re.compile(r"%[\w.]+")
COPIES = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "arith.extsi", "arith.trunci"}


def make_ttir(launch: Launch) -> str:
    """Triton IR of a launch, before any stage that depends on the GPU."""
    backend, context = make_backend(TARGET), ir.context()
    options = backend.parse_options(dict(launch.options))
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(TARGET, options, *functions, context)
    stages: dict[str, Callable] = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](module, {}))


@dataclass
class Value:
    """Bounds of one SSA value, and its operands."""

    low: int
    high: int
    inputs: list["Value"] = field(default_factory=list)
    overflow: str = ""


def get_type_range(bits: int) -> Value:
    return Value(0, 1) if bits == 1 else Value(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def evaluate_at_bounds(a: Value, b: Value, function: Callable[[int, int], int]) -> tuple[int, int]:
    results = [function(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return min(results), max(results)


def divide_toward_zero(a: int, b: int) -> int:
    """Quotient rounded toward zero. A divisor of 0, which no launch has, counts as 1."""
    quotient = abs(a) // max(abs(b), 1)
    return quotient if (a < 0) == (b < 0) else -quotient


def bound_remainder(a: Value, b: Value) -> tuple[int, int]:
    limit = max(abs(b.low), abs(b.high)) - 1
    return (0 if a.low >= 0 else -limit), min(limit, max(a.high, 0))


def bound_bitwise_and(a: Value, b: Value) -> tuple[int, int]:
    masks = [x.high for x in (a, b) if x.low >= 0]
    return (0, min(masks)) if masks else (min(a.low, b.low), max(a.high, b.high))


BINARY: dict[str, Callable[[Value, Value], tuple[int, int]]] = {
    "arith.addi": lambda a, b: (a.low + b.low, a.high + b.high),
    "arith.subi": lambda a, b: (a.low - b.high, a.high - b.low),
    "arith.muli": lambda a, b: evaluate_at_bounds(a, b, lambda x, y: x * y),
    "arith.divsi": lambda a, b: evaluate_at_bounds(a, b, divide_toward_zero),
    "arith.remsi": bound_remainder,
    "arith.minsi": lambda a, b: (min(a.low, b.low), min(a.high, b.high)),
    "arith.maxsi": lambda a, b: (max(a.low, b.low), max(a.high, b.high)),
    "arith.andi": bound_bitwise_and,
    "arith.shli": lambda a, b: evaluate_at_bounds(a, b, lambda x, y: x << max(min(y, 64), 0)),
}


class RangeAnalysis:
    """Bounds of the integers of one kernel, line by line of its IR."""

    def __init__(self, text: str, launch: Launch) -> None:
        self.launch = launch
        self.values = {f"%{name}": Value(number, number) for name, number in launch.integers.items()}
        self.roots: list[Value] = []  # offsets and masks
        self.region = ""  # result of the sum or scan whose body is being read
        for line in text.splitlines():
            self.read_line(re.sub(r"\bloc\(.*", "", line))

    def read_line(self, line: str) -> None:
        if match := LOOP.search(line):
            index, start, stop = match.groups()
            low, high = self.get(start), self.get(stop)
            self.values[index] = Value(low.low, max(low.high, high.high - 1), [low, high])
        if "tt.addptr" in line or "tt.load" in line or "tt.store" in line:
            self.add_roots(line)
        if match := REGION.match(line):
            self.region = match[1]
        elif line.lstrip().startswith("}) :") and self.get_result_bits("tt.reduce", line) == 32:
            self.values[self.region] = Value(0, ROW_LIMIT)
        elif match := RESULT.match(line):
            name, operation, rest = match.groups()
            if bits := self.get_result_bits(operation, rest):
                self.values[name] = self.evaluate(operation, rest, bits)

    def add_roots(self, line: str) -> None:
        operands = OPERAND.findall(line.partition("=")[2] or line)
        if "tt.store" in line:
            del operands[1]  # the stored numbers
        self.roots += [self.values[name] for name in operands[1:] if name in self.values]

    def get(self, name: str) -> Value:
        return self.values.get(name) or get_type_range(64)

    @staticmethod
    def get_result_bits(operation: str, rest: str) -> int:
        """Bits of an integer result; 0 for other types. The type is last, or for a load that of the pointer."""
        if operation == "arith.cmpi":
            return 1
        result_type = re.split(r" to | -> | : ", rest.rstrip(" {"))[-1]
        if operation == "tt.load":
            match = re.search(r"ptr<i(\d+)>", result_type)
        else:
            match = re.search(r"(?:^|x)i(\d+)>?$", result_type.split(", ")[-1].strip())
        return int(match[1]) if match else 0

    def evaluate(self, operation: str, rest: str, bits: int) -> Value:
        operands = [self.get(name) for name in OPERAND.findall(rest)]
        value = Value(*self.get_bounds(operation, rest, bits, operands), operands)
        limit = get_type_range(bits)
        if value.low < limit.low or value.high > limit.high:
            value.overflow = f"{operation}{rest.rstrip()} is between {value.low} and {value.high}"
            value.low, value.high = limit.low, limit.high
        if operation == "tt.load":
            value.inputs = []
        return value

    def get_bounds(self, operation: str, rest: str, bits: int, operands: list[Value]) -> tuple[int, int]:
        if operation in BINARY and bits > 1:
            return BINARY[operation](*operands)
        if operation in COPIES:
            return operands[0].low, operands[0].high
        if operation == "arith.select":
            return min(x.low for x in operands[1:]), max(x.high for x in operands[1:])
        if operation == "arith.extui" and operands[0].low >= 0:
            return operands[0].low, operands[0].high
        return self.get_leaf_bounds(operation, rest, bits)

    def get_leaf_bounds(self, operation: str, rest: str, bits: int) -> tuple[int, int]:
        """Bounds of values without operands, or with unknown operands."""
        if operation == "tt.get_program_id":
            axis = "xyz".index(rest.split()[0])
            return 0, (*self.launch.grid, 1, 1)[axis] - 1
        if operation == "tt.make_range":
            end, start = (int(re.search(rf"{name} = (-?\d+)", rest)[1]) for name in ("end", "start"))
            return start, end - 1
        if operation == "arith.constant" and (match := re.search(r"^ (?:dense<)?(-?\d+)>? :", rest)):
            return int(match[1]), int(match[1])
        if operation == "arith.extui":
            source_bits = re.findall(r"i(\d+)", rest)
            return 0, 2 ** int(source_bits[0]) - 1
        if operation == "tt.load" and bits == 32:
            return 0, ROW_LIMIT
        limit = get_type_range(32 if operation == "tt.load" and bits == 64 else bits)
        return limit.low, limit.high

    def find_overflows(self) -> list[str]:
        """Operations that overflow and that an address or a mask depends on."""
        visited: dict[int, Value] = {}
        pending = list(self.roots)
        while pending:
            value = pending.pop()
            if id(value) not in visited:
                visited[id(value)] = value
                pending += value.inputs
        return sorted({value.overflow for value in visited.values() if value.overflow})


def find_overflows(launch: Launch) -> list[str]:
    """A line for each overflow of a launch."""
    names = ", ".join(f"{name}={number}" for name, number in launch.integers.items())
    return [f"{launch.name}({names}): {line}" for line in RangeAnalysis(make_ttir(launch), launch).find_overflows()]
