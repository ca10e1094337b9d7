"""Integer overflow in the addresses and masks of Triton kernels, proved from their IR for given launches.

A launch fixes the integer arguments and the grid. From those, the smallest and largest value of every integer in the
Triton IR follow. An addition, product or shift whose exact result does not fit its type is an overflow. Those that no
address and no mask depends on are left out: kernels do arithmetic on bits of floats too.

What a launch does not fix is assumed. Loaded 64-bit integers are indices (tokens of a vocabulary) that fit 32 bits.
Loaded 32-bit integers are numbers of rows (where those of an expert end), and so are sums and scans over a block: 0 to
2^30. What such a sum adds up is not checked.
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
REGION = re.compile(r"^\s*(%[\w.]+) = \"tt\.(?:reduce|scan)\"")  # the type of the result follows some lines below
ROW_LIMIT = 2**30
LOOP = re.compile(r"scf\.for (%[\w.]+) = (%[\w.]+) to (%[\w.]+) step")
OPERAND = re.compile(r"%[\w.]+")
COPIES = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "arith.extsi", "arith.trunci"}


def make_ttir(launch: Launch) -> str:
    """Triton IR of a launch, before anything that depends on a GPU."""
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
    """Bounds of one SSA value, and the values that it is computed from."""

    low: int
    high: int
    inputs: list["Value"] = field(default_factory=list)
    overflow: str = ""


def full_range(bits: int) -> Value:
    return Value(0, 1) if bits == 1 else Value(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def corners(a: Value, b: Value, function: Callable[[int, int], int]) -> tuple[int, int]:
    results = [function(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return min(results), max(results)


def divide(a: int, b: int) -> int:
    """Quotient that is cut toward zero; of 0, which no launch divides by, the largest."""
    quotient = abs(a) // max(abs(b), 1)
    return quotient if (a < 0) == (b < 0) else -quotient


def remainder(a: Value, b: Value) -> tuple[int, int]:
    limit = max(abs(b.low), abs(b.high)) - 1
    return (0 if a.low >= 0 else -limit), min(limit, max(a.high, 0))


def bitwise_and(a: Value, b: Value) -> tuple[int, int]:
    masks = [x.high for x in (a, b) if x.low >= 0]
    return (0, min(masks)) if masks else (min(a.low, b.low), max(a.high, b.high))


BINARY: dict[str, Callable[[Value, Value], tuple[int, int]]] = {
    "arith.addi": lambda a, b: (a.low + b.low, a.high + b.high),
    "arith.subi": lambda a, b: (a.low - b.high, a.high - b.low),
    "arith.muli": lambda a, b: corners(a, b, lambda x, y: x * y),
    "arith.divsi": lambda a, b: corners(a, b, divide),
    "arith.remsi": remainder,
    "arith.minsi": lambda a, b: (min(a.low, b.low), min(a.high, b.high)),
    "arith.maxsi": lambda a, b: (max(a.low, b.low), max(a.high, b.high)),
    "arith.andi": bitwise_and,
    "arith.shli": lambda a, b: corners(a, b, lambda x, y: x << max(min(y, 64), 0)),
}


class RangeAnalysis:
    """Bounds of the integers of one kernel, line by line of its IR."""

    def __init__(self, text: str, launch: Launch) -> None:
        self.launch = launch
        self.values = {f"%{name}": Value(number, number) for name, number in launch.integers.items()}
        self.roots: list[Value] = []  # offsets and masks
        self.region = ""  # the sum or scan of which the body is being read
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
        elif line.lstrip().startswith("}) :") and self.result_bits("tt.reduce", line) == 32:
            self.values[self.region] = Value(0, ROW_LIMIT)
        elif match := RESULT.match(line):
            name, operation, rest = match.groups()
            if bits := self.result_bits(operation, rest):
                self.values[name] = self.evaluate(operation, rest, bits)

    def add_roots(self, line: str) -> None:
        operands = OPERAND.findall(line.partition("=")[2] or line)
        if "tt.store" in line:
            del operands[1]  # the stored numbers
        self.roots += [self.values[name] for name in operands[1:] if name in self.values]

    def get(self, name: str) -> Value:
        return self.values.get(name) or full_range(64)

    @staticmethod
    def result_bits(operation: str, rest: str) -> int:
        """Bits of an integer result; 0 of any other. A result has its type last, a load at its pointer."""
        if operation == "arith.cmpi":
            return 1
        kind = re.split(r" to | -> | : ", rest.rstrip(" {"))[-1]
        if operation == "tt.load":
            match = re.search(r"ptr<i(\d+)>", kind)
        else:
            match = re.search(r"(?:^|x)i(\d+)>?$", kind.split(", ")[-1].strip())
        return int(match[1]) if match else 0

    def evaluate(self, operation: str, rest: str, bits: int) -> Value:
        operands = [self.get(name) for name in OPERAND.findall(rest)]
        value = Value(*self.bounds(operation, rest, bits, operands), operands)
        limit = full_range(bits)
        if value.low < limit.low or value.high > limit.high:
            value.overflow = f"{operation}{rest.rstrip()} is between {value.low} and {value.high}"
            value.low, value.high = limit.low, limit.high
        if operation == "tt.load":
            value.inputs = []
        return value

    def bounds(self, operation: str, rest: str, bits: int, operands: list[Value]) -> tuple[int, int]:
        if operation in BINARY and bits > 1:
            return BINARY[operation](*operands)
        if operation in COPIES:
            return operands[0].low, operands[0].high
        if operation == "arith.select":
            return min(x.low for x in operands[1:]), max(x.high for x in operands[1:])
        if operation == "arith.extui" and operands[0].low >= 0:
            return operands[0].low, operands[0].high
        return self.leaf_bounds(operation, rest, bits)

    def leaf_bounds(self, operation: str, rest: str, bits: int) -> tuple[int, int]:
        """Range of values that depend on no others, or on numbers that cannot be known."""
        if operation == "tt.get_program_id":
            axis = "xyz".index(rest.split()[0])
            return 0, (*self.launch.grid, 1, 1)[axis] - 1
        if operation == "tt.make_range":
            end, start = (int(re.search(rf"{name} = (-?\d+)", rest)[1]) for name in ("end", "start"))
            return start, end - 1
        if operation == "arith.constant" and (match := re.search(r"^ (?:dense<)?(-?\d+)>? :", rest)):
            return int(match[1]), int(match[1])
        if operation == "arith.extui":  # of bytes, mostly
            source = re.findall(r"i(\d+)", rest)
            return 0, 2 ** int(source[0]) - 1
        if operation == "tt.load" and bits == 32:
            return 0, ROW_LIMIT
        limit = full_range(32 if operation == "tt.load" and bits == 64 else bits)
        return limit.low, limit.high

    def overflows(self) -> list[str]:
        """Operations that overflow on the way to an address or a mask."""
        seen: dict[int, Value] = {}
        pending = list(self.roots)
        while pending:
            value = pending.pop()
            if id(value) not in seen:
                seen[id(value)] = value
                pending += value.inputs
        return sorted({value.overflow for value in seen.values() if value.overflow})


def find_overflows(launch: Launch) -> list[str]:
    """A line for each overflow of a launch."""
    names = ", ".join(f"{name}={number}" for name, number in launch.integers.items())
    return [f"{launch.name}({names}): {line}" for line in RangeAnalysis(make_ttir(launch), launch).overflows()]
