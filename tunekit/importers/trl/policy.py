"""GRPO and RLOO of TRL."""

from typing import Any

from tunekit.importers.draft import Draft
from tunekit.importers.foreign_keys import ForeignKeys

GRPO_LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo")
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"kind": "accuracy"},
    "get_soft_overlong_punishment": {
        "kind": "soft_overlong_punishment", "max_completion_len": 1280, "soft_punish_cache": 256,
    },
}  # fmt: skip
LOSS_KEYS = ("epsilon", "epsilon_high", "delta", "mask_truncated_completions", "top_entropy_quantile", "scale_rewards",
             "importance_sampling_level", "use_bias_correction_kl", "sapo_temperature_neg", "sapo_temperature_pos",
             "normalize_advantages")  # fmt: skip
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def convert_policy(keys: ForeignKeys, draft: Draft, task: str) -> None:
    """Rewards, loss, sampling and generation of GRPO or RLOO."""
    convert_rewards(keys, draft)
    kind = "rloo" if task == "rloo" else str(keys.take("loss_type", default="dapo"))
    if kind not in (*GRPO_LOSSES, "rloo"):
        draft.drop("loss_type", kind, "this loss is not available: dapo")
        kind = "dapo"
    draft.set("loss.kind", kind)
    draft.set("loss.beta", float(keys.number("beta", default=0.05 if task == "rloo" else 0.0)))
    allowed = get_loss_keys(kind)
    for name in LOSS_KEYS:
        if (value := keys.take(name)) is not None:
            value = {True: "group", False: "none"}.get(value, value) if name == "scale_rewards" else value
            if name in allowed:
                draft.set(f"loss.{name}", value)
            else:
                draft.report_unneeded(name, value, f"has no effect with the loss {kind}")
    draft.set("num_generations", int(keys.number("num_generations", default=2 if task == "rloo" else 8)))
    convert_lengths(keys, draft)
    for name in SAMPLING_KEYS:
        if (value := keys.number(name)) is not None:
            draft.set(f"sampling.{name}", value)
    if (iterations := keys.number("num_iterations", default=1)) > 1:
        draft.set("num_iterations", int(iterations))
    steps, accumulation = keys.number("steps_per_generation"), int(keys.peek("gradient_accumulation_steps") or 1)
    if steps is not None and steps > accumulation:
        draft.set("steps_per_generation", int(steps) // accumulation, "Optimizer steps; TRL counts micro-batches")
    elif steps is not None:
        draft.report_unneeded("steps_per_generation", steps, "not needed: answers are sampled for each optimizer step")
    convert_engine(keys, draft)


def get_loss_keys(kind: str) -> set[str]:
    """Keys of LOSS_KEYS that a loss has."""
    names = {*LOSS_KEYS} - {"sapo_temperature_neg", "sapo_temperature_pos", "normalize_advantages"}
    if kind == "rloo":
        return names - {"scale_rewards", "importance_sampling_level", "use_bias_correction_kl"} | {
            "normalize_advantages"
        }
    if kind == "cispo":
        return names - {"epsilon", "delta"}
    if kind == "sapo":
        return names - {"epsilon", "epsilon_high", "delta"} | {"sapo_temperature_neg", "sapo_temperature_pos"}
    return names


def convert_lengths(keys: ForeignKeys, draft: Draft) -> None:
    tokens = int(keys.number("max_completion_length", default=512))
    prompt = keys.number("max_prompt_length")
    draft.set("sampling.max_new_tokens", tokens)
    comment = "" if prompt else "Prompt and answer; prompts have no limit there"
    draft.set("data.max_length", int(prompt or 3584) + tokens, comment)
    if prompt:
        draft.set("data.max_prompt_length", int(prompt))


def convert_rewards(keys: ForeignKeys, draft: Draft) -> None:
    """Reward functions by name or dotted path, and a reward model."""
    models, names = keys.texts("reward_model_name_or_path"), keys.texts("reward_funcs")
    weights = keys.numbers("reward_weights")
    rewards: list[dict[str, Any]] = []
    for i, name in enumerate([*models, *names]):
        reward = {"kind": "reward_model", "model": name} if i < len(models) else make_reward(name)
        if reward is None:
            draft.drop("reward_funcs", name, "write it as a function in a Python file: rewards='FILE.py:function'")
        else:
            rewards.append(reward | ({"weight": weights[i]} if i < len(weights) else {}))
    if not rewards:
        rewards = [{"kind": "accuracy"}]
        note = "the script that trains defines the rewards: set rewards='FILE.py:function'"
        draft.drop("reward_funcs", None, note)
    draft.set("rewards", rewards)


def make_reward(name: str) -> dict[str, Any] | None:
    """Reward of the name of a function or its dotted path; None for one that only TRL has."""
    if name in REWARDS:
        return dict(REWARDS[name])
    if "." not in name or name.startswith("trl."):
        return None
    module, _, function = name.rpartition(".")
    return {"kind": "function", "function": f"{module.replace('.', '/')}.py:{function}"}


def convert_engine(keys: ForeignKeys, draft: Draft) -> None:
    """A vLLM server; generation in the process of the trainer needs no key."""
    uses = keys.flag("use_vllm")
    if not uses:
        names = ("vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")
        draft.report_unneeded_keys(keys, "has no effect without use_vllm", *names)
    mode = str(keys.take("vllm_mode", default="colocate"))
    url = keys.take("vllm_server_base_url")
    host, port = keys.take("vllm_server_host", default="0.0.0.0"), keys.take("vllm_server_port", default=8000)
    timeout = keys.number("vllm_server_timeout")
    if uses and mode == "server" and draft.get("adapter") is None:
        draft.drop("vllm_mode", mode, "a server gets new weights as a LoRA adapter; without one, the trainer generates")
    elif uses and mode == "server":
        address = str(url or f"http://{host}:{port}").rstrip("/").removesuffix("/v1")
        draft.set("engine", {"kind": "server", "base_url": f"{address}/v1"})
        draft.differs("vllm_mode", mode, "start the server with `vllm serve`, not with trl vllm-serve")
        if timeout:
            draft.set("engine.timeout_seconds", float(timeout))
    elif uses:
        draft.differs("use_vllm", True, "answers are generated by the trainer itself; engine selects a vLLM server")


def round_batch(draft: Draft) -> None:
    """Round the batch up to whole groups of answers: the original may have more devices than are known."""
    group, size = draft.get("num_generations"), draft.get("global_batch_size")
    if group and size is not None and size % group:
        draft.set("global_batch_size", -(-size // group) * group, "Answers of a step, rounded up to whole prompts")
