"""The rollout engine on a GPU: tokens of every kind of cache compared with the CPU in fp32, and speed of an 8B Llama.

python scripts/gpu/check_rollout_engine.py cuda|cpu [--small] [--speed-only]
"""

import argparse
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

import gpu
import torch
from decode_profile import MIN_NEW_TOKENS, measure_time_per_call, print_step_profile

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

# Sliding windows, recurrent states, latent attention, attention sinks, RoPE that depends on the length, shared KV
# layers, and chunked attention.
FAMILIES = ("llama3.2", "gemma3", "qwen3-next", "falcon-h1", "nemotron-h", "deepseek-v3", "gpt-oss", "lfm2-biases")
FAMILIES += ("phi3-long", "gemma3n", "llama4")
PROMPT_LENGTHS, TOOL_RESULT = (7, 1, 12, 3, 9), [11, 12, 13]
MAX_LOGPROB_DIFFERENCE = 1e-3  # between two devices in fp32
FP32 = PrecisionConfig("fp32", "fp32", "fp32")


def generate_two_turns(model: Decoder) -> dict[str, list[TokenOutput]]:
    """Sample answers with fewer slots than requests, append tokens to each cache, and sample second answers."""
    engine = GenerationEngine(model, 3, 64, None)
    sampling = SamplingConfig(1.3, max_new_tokens=10, seed=5)
    prompts = {f"row {n}": [(5 * i + n) % 60 + 4 for i in range(n)] for n in PROMPT_LENGTHS}
    outputs: dict[str, list[TokenOutput]] = {request_id: [] for request_id in prompts}
    for request_id, prompt in prompts.items():
        engine.add_request(GenerationRequest(request_id, prompt, sampling, keep_cache=True))
    in_second_turn: set[str] = set()
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs[output.request_id].append(output)
            if output.finish_reason and output.request_id not in in_second_turn:
                in_second_turn.add(output.request_id)
                engine.append_tokens(output.request_id, TOOL_RESULT)
            elif output.finish_reason:
                engine.abort(output.request_id)
    return outputs


def compare_with_cpu(family: str, device: str) -> tuple[bool, str]:
    """Sample on the CPU and on the device. Returns whether tokens and log-probabilities agree, and a description."""
    results = []
    with tempfile.TemporaryDirectory() as directory:
        source = HFCheckpoint.open(make_checkpoint(Path(directory), family))
        for device_type in ("cpu", device):
            with DistributedContext(0, device_type) as dist:
                model = build.build_model(source, NoQuantization(), NoAdapter(), FP32, MemoryConfig(), dist)
                results.append(generate_two_turns(model))
    expected, actual = results
    num_equal, max_difference = 0, 0.0
    for request_id, outputs in expected.items():
        pairs = list(zip(outputs, actual[request_id], strict=True))
        equal_length = next((i for i, (a, b) in enumerate(pairs) if a.token != b.token), len(pairs))
        max_difference = max(max_difference, *(abs(a.logprob - b.logprob) for a, b in pairs[:equal_length]), 0.0)
        num_equal += equal_length == len(pairs)
    # A random number close to a boundary may select another token; a wrong cache changes nearly all rows.
    passed = num_equal >= len(expected) - 1 and max_difference < MAX_LOGPROB_DIFFERENCE
    return passed, f"{num_equal} of {len(expected)} rows equal, max_logprob_diff {max_difference:.1e}"


def check_family(family: str, device: str) -> bool:
    try:
        passed, text = compare_with_cpu(family, device)
    except Exception:
        passed, text = False, f"\n{traceback.format_exc(limit=-4)}"
    print(f"{'ok' if passed else 'FAIL'} {family}: {text}", flush=True)
    return passed


def measure_speed(quantization: NoQuantization | NF4Config, size: gpu.Size, device: torch.device) -> None:
    """Print the speed of full batches, and the profile of a decode step.

    Answers are generated three times: the first time captures graphs and loads kernels, the second time replays the
    graphs, and the third time captures them again for a new cache, as each step of reinforcement learning does.
    """
    precision = PrecisionConfig("bf16", master_dtype="fp32", frozen_dtype="bf16")
    config = size.config("tunekit/llama3_1_8b")
    model = gpu.build_random_model(config, quantization, LoRAConfig(16), MemoryConfig(), precision).eval()
    weights_name = type(quantization).__name__
    num_bytes = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    print(f"{weights_name}: weights of {num_bytes / 2**30:.2f} GiB", flush=True)
    for num_rows in (8, 64):
        num_tokens, name = MIN_NEW_TOKENS if size.small else 256, f"{weights_name}, {num_rows} rows"
        sampling = SamplingConfig(1.0, max_new_tokens=num_tokens)
        requests = [GenerationRequest(f"{i}", [1 + (i + j) % 50 for j in range(64)], sampling) for i in range(num_rows)]
        engine = GenerationEngine(model, num_rows, 64 + num_tokens, None)
        for graphs in ("captured", "replayed", "captured again"):
            if graphs == "captured again":
                engine.sleep()
            seconds = measure_time_per_call(partial(engine.generate, requests), 1, device)
            speed = f"{num_rows * num_tokens / seconds:,.0f} tokens/s, {1e3 * seconds / num_tokens:.2f} ms/step"
            print(f"{name}, graphs {graphs}: {seconds:.2f} s, {speed}, including prefill", flush=True)
        print_step_profile(engine, requests, name, with_details=num_rows == 64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="two families, and a small model for the speed")
    parser.add_argument("--speed-only", action="store_true", help="do not compare tokens with the CPU")
    args = parser.parse_args()
    gpu.DEVICE = torch.device(args.device)
    families = () if args.speed_only else FAMILIES[:2] if args.small else FAMILIES
    results = [check_family(family, args.device) for family in families]
    for quantization in (NoQuantization(), NF4Config()):
        measure_speed(quantization, gpu.Size(args.small), gpu.DEVICE)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
