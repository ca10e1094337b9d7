"""The rollout engine on a GPU: tokens of every kind of cache next to the CPU in fp32, and its speed with an 8B Llama.

python scripts/gpu/engine.py cuda|cpu [--small] [--speed]
"""

import argparse
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

import gpu
import torch
from decode_profile import MIN_TOKENS, print_split, seconds_per_call

from tests.helpers.random_checkpoints import make_checkpoint
from tunekit import build
from tunekit.adapters.config import LoRAConfig, NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.distributed.context import DistributedContext
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.requests import GenerationRequest, TokenOutput
from tunekit.generation.sampling import SamplingConfig
from tunekit.memory.config import MemoryConfig
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NF4Config, NoQuantization

# Layers with windows, recurrent states, latent attention, sinks, switched RoPE, keys of other layers, and chunks.
NAMES = ("llama3.2", "gemma3", "qwen3-next", "falcon-h1", "nemotron-h", "deepseek-v3", "gpt-oss", "lfm2-biases")
NAMES += ("phi3-long", "gemma3n", "llama4")
PROMPT_LENGTHS, TOOL_RESULT = (7, 1, 12, 3, 9), [11, 12, 13]
MAX_LOGPROB_DIFFERENCE = 1e-3  # of fp32 on two devices
FP32 = PrecisionConfig("fp32", "fp32", "fp32")


def run_two_turns(model: Decoder) -> dict[str, list[TokenOutput]]:
    """Sampled answers in fewer slots than requests, and second answers after further tokens in the same cache."""
    engine = GenerationEngine(model, 3, 64, None)
    sampling = SamplingConfig(1.3, max_new_tokens=10, seed=5)
    prompts = {f"row {n}": [(5 * i + n) % 60 + 4 for i in range(n)] for n in PROMPT_LENGTHS}
    outputs: dict[str, list[TokenOutput]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(GenerationRequest(name, prompt, sampling, keep_cache=True))
    appended: set[str] = set()
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs[output.request_id].append(output)
            if output.finish_reason and output.request_id not in appended:
                appended.add(output.request_id)
                engine.append_tokens(output.request_id, TOOL_RESULT)
            elif output.finish_reason:
                engine.abort(output.request_id)
    return outputs


def compare_devices(name: str, device: str) -> str:
    """Whether a device samples the tokens of the CPU, and the largest difference of their log-probabilities."""
    with tempfile.TemporaryDirectory() as folder:
        source = HFCheckpoint.open(make_checkpoint(Path(folder), name))
        results = []
        for device_type in ("cpu", device):
            with DistributedContext(0, device_type) as dist:
                model = build.build_model(source, NoQuantization(), NoAdapter(), FP32, MemoryConfig(), dist)
                results.append(run_two_turns(model))
    expected, actual = results
    num_equal, difference = 0, 0.0
    for row, outputs in expected.items():
        pairs = list(zip(outputs, actual[row], strict=True))
        equal = next((i for i, (a, b) in enumerate(pairs) if a.token != b.token), len(pairs))
        difference = max(difference, *(abs(a.logprob - b.logprob) for a, b in pairs[:equal]), 0.0)
        num_equal += equal == len(pairs)
    # A random number close to a boundary may select another token; a wrong cache changes nearly all rows.
    ok = num_equal >= len(expected) - 1 and difference < MAX_LOGPROB_DIFFERENCE
    return f"{'ok' if ok else 'FAIL'} {name}: {num_equal} of {len(expected)} rows equal, logprobs {difference:.1e}"


def measure_speed(weights: NoQuantization | NF4Config, size: gpu.Size, device: torch.device) -> None:
    """Speed of full batches, next to the time to read the weights once per step, and the split of a step.

    Answers are generated three times: the first time captures graphs and loads kernels, the second time replays the
    graphs, and the third one captures them again for a new cache, as each step of reinforcement learning does.
    """
    precision = PrecisionConfig("bf16", master_dtype="fp32", frozen_dtype="bf16")
    model = gpu.model(size.config("tunekit/llama3_1_8b"), weights, LoRAConfig(16), MemoryConfig(), precision).eval()
    num_bytes = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    print(f"{type(weights).__name__}: weights of {num_bytes / 2**30:.2f} GiB", flush=True)
    for rows in (8, 64):
        tokens, name = MIN_TOKENS if size.small else 256, f"{type(weights).__name__}, {rows} rows"
        requests = [
            GenerationRequest(f"{i}", [1 + (i + j) % 50 for j in range(64)], SamplingConfig(1.0, max_new_tokens=tokens))
            for i in range(rows)
        ]
        engine = GenerationEngine(model, rows, 64 + tokens, None)
        for part in ("first", "replayed", "captured again"):
            if part == "captured again":
                engine.sleep()
            seconds = seconds_per_call(partial(engine.generate, requests), 1, device)
            step = f"{rows * tokens / seconds:,.0f} tokens/s, {1e3 * seconds / tokens:.2f} ms a step"
            print(f"{name}, {part}: {seconds:.2f} s, {step} with the prompts", flush=True)
        print_split(engine, requests, name, has_details=rows == 64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="fewer families, and a small model for the speed")
    parser.add_argument("--speed", action="store_true", help="only the speed")
    args = parser.parse_args()
    gpu.DEVICE = torch.device(args.device)
    failures = 0
    for name in () if args.speed else NAMES[:2] if args.small else NAMES:
        try:
            line = compare_devices(name, args.device)
        except Exception:
            line = f"FAIL {name}\n{traceback.format_exc(limit=-4)}"
        failures += line.startswith("FAIL")
        print(line, flush=True)
    for weights in (NoQuantization(), NF4Config()):
        measure_speed(weights, gpu.Size(args.small), gpu.DEVICE)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
