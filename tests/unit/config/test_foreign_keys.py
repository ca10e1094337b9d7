"""Keys of other trainers are answered with our keys, and the hint tables are correct."""

import dataclasses
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import TrainingArguments
from trl import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig
from trl.experimental.gkd import GKDConfig

from tunekit.cli import main as cli
from tunekit.cli import recipe_loader, registry
from tunekit.config.choices import ChoiceRegistry, field_slots, iter_slots
from tunekit.config.errors import ConfigError
from tunekit.config.load import load_config
from tunekit.config.migration_hints import RECIPES, TABLE, KeyHint, find_hint, suggest_recipe
from tunekit.config.yaml_parser import read_recipe

DOCS = Path(__file__).parents[3] / "docs"
# keys that no config class has
KEYS_OUTSIDE_CONFIGS = {"num_labels", "id2label", "label2id", "margin", "peft_config", "ref_model"}
TRAINING_RECIPES = ("sft", "preference", "reward", "embed", "distill", "grpo", "ppo")


# keys whose hint lists values
NAMES_WITH_VALUE_LISTS = ("optim", "lr_scheduler", "ref_model", "bf16", "train_on_inputs", "loss_type")
REQUIRED_OPTIONS = {  # options that a recipe requires
    "sft": "model: m\ndata: {source: s}\noutput_dir: o\n",
    "distill": "model: m\ndata: {source: s}\noutput_dir: o\nteacher: {model: t}\n",
    "grpo": "model: m\ndata: {source: s}\noutput_dir: o\nrewards: [{kind: length}]\n",
    "ppo": "model: m\ndata: {source: s}\noutput_dir: o\nrewards: [{kind: length}]\n",
    "evaluate": "model: m\ndata: {source: s}\n",
    "generate": "model: m\nprompts: [p]\n",
}


def recipe_keys(recipe: str) -> set[str]:
    paths = (path for path, _ in iter_slots(recipe_loader.load_recipe(recipe).CONFIG, ChoiceRegistry()))
    return {".".join(part for part in path if part != "0") for path in paths}


KEYS = {name: recipe_keys(name) for name in registry.list_recipes()}


@cache
def shown_hint(name: str, recipe: str) -> KeyHint | None:
    return find_hint(name.split("."), KEYS[recipe])


def test_each_hint_is_used_by_a_recipe() -> None:
    """Some recipe shows the hint: its keys exist, and no earlier row hides it."""
    assert not [
        (name, row.key)
        for row in TABLE
        for name in row.names.split()
        if not any(shown_hint(name, recipe) is row for recipe in KEYS)
    ]


def recipes_with_hint(row: KeyHint) -> list[str]:
    """Recipes that show this hint."""
    return [recipe for recipe in KEYS if any(shown_hint(name, recipe) is row for name in row.names.split())]


@cache
def config_errors(recipe: str, *overrides: str) -> list[str]:
    """Errors of the overrides, in addition to the required options of the recipe."""
    if any(word.startswith("data.kind=") for word in overrides):
        overrides = (*overrides, "data.source=s")  # another kind starts without the keys of the old one
    try:
        load_config(
            recipe_loader.load_recipe(recipe).CONFIG, REQUIRED_OPTIONS.get(recipe, REQUIRED_OPTIONS["sft"]), overrides
        )
    except ConfigError as error:
        return [*error.lines]
    return []


def hint_examples(row: KeyHint) -> list[str]:
    """Texts `key=value` in the hint, and values it gives for its own key."""
    texts = re.findall(r"(?<![\w.])[a-z_.]+=(?:'[^']+'|[\w\[\]]+)", row.note)
    texts += [f"{row.key}={value}" for value in re.findall(r"^(?:\{.*\}|\[.*\])$|\[\w+\]", row.note)]
    return [text.replace("'", "").replace("=N", "=2") for text in texts]


def hint_problems(row: KeyHint, recipe: str) -> Iterator[str]:
    """Problems of a hint in a recipe that shows it: examples that do not load, and keys that do not exist."""
    target_recipe = next(iter(re.findall(rf"recipe ({'|'.join(KEYS)})\b", row.note)), recipe)
    yield from config_errors(target_recipe, *hint_examples(row))
    if row.key:
        for line in config_errors(recipe, *hint_examples(row), f"{row.key}=?"):
            if "unknown key" in line and "belongs to" not in line:
                yield line
    key_parts = {part for key in KEYS[target_recipe] for part in key.split(".")} | {"all"}
    yield from {*re.findall(r"`(\w+)`", row.note)} - key_parts
    yield from {*re.findall(r"(?<![\w.])([a-z_]+\.(?!kind\b)[a-z_]+)\b", row.note)} - KEYS[target_recipe]
    if row.names.split()[0] in NAMES_WITH_VALUE_LISTS:
        for value in re.split(r",? or |, ", row.note.rpartition(": ")[2]):
            adapter = ["adapter=lora"] if value == "disable_adapter" else []
            yield from config_errors(recipe, f"{row.key}={value}", *adapter) if value.isalnum() else ()


def test_hints_are_valid_in_all_recipes_that_show_them() -> None:
    assert not [
        (row.names, recipe, problem)
        for row in TABLE
        for recipe in recipes_with_hint(row)
        for problem in hint_problems(row, recipe)
    ]


def test_hint_examples_are_parsed() -> None:
    """Without examples, the test above would always pass."""
    (optim,) = (row for row in TABLE if row.names == "optim")
    assert config_errors("sft", "optimizer=adam") and optim.note == "adamw, adamw8bit, muon or sgd"
    texts = {example for row in TABLE for example in hint_examples(row)}
    assert {
        "reference=precomputed",
        "adapter=lora",
        "loss=[{kind: dpo, weight: 0.8}, sft]",
        "report_to=[wandb]",
    } <= texts


def test_config_keys_have_no_foreign_hint() -> None:
    for recipe in TRAINING_RECIPES:
        config_keys = set(field_slots(recipe_loader.load_recipe(recipe).CONFIG))
        assert not [key for key in config_keys if find_hint([key], KEYS[recipe])], recipe


@pytest.mark.parametrize(
    ("config", "key", "expected"),
    [
        ("nano/dpo", "learning_rate", "use optimizer.lr"),
        (
            "nano/dpo",
            "per_device_train_batch_size",
            "use micro_batch_size: `global_batch_size` is the number of rows",
        ),
        ("nano/dpo", "gradient_accumulation_steps", "use global_batch_size: "),
        ("nano/dpo", "num_train_epochs", "use epochs"),
        ("nano/dpo", "precompute_ref_log_probs", "use reference: set reference=precomputed"),
        ("nano/dpo", "max_length", "'max_length' is a key of data"),
        ("nano/dpo", "ref_model", "use reference: always the initial policy"),
        ("nano/dpo", "loss_type", "use loss: set loss=sigmoid, ipo"),
        ("nano/tools_lora", "optimizer._component_", "optimizer.kind=adamw"),
        ("nano/tools_lora", "recipe", "tune run RECIPE CONFIG"),
        ("nano/dpo", "reward_weights", "reward functions belong to recipe grpo"),
        ("nano/grpo", "max_completion_length", "use sampling.max_new_tokens"),
        ("nano/grpo", "max_prompt_length", "use data.max_prompt_length"),
        ("nano/grpo", "reward_funcs", "use rewards"),
        ("nano/grpo", "loss_type", "use loss: set loss=grpo, dapo"),
        ("nano/grpo", "vllm_server_base_url", "use engine.base_url"),
        ("nano/grpo", "vllm_importance_sampling_mode", "use loss.importance_sampling_mode"),
        ("nano/ppo", "loss_type", "this recipe has one loss"),
        ("nano/ppo", "kl_coef", "'kl_coef' is a key of loss"),
        ("nano/ppo", "ppo_epochs", "use num_ppo_epochs"),
        ("nano/ppo", "mini_batch_size", "use global_batch_size: answers of an optimizer step"),
        ("nano/ppo", "stop_token", "use sampling.stop_strings"),
        ("nano/ppo", "num_sample_generations", "use eval_every"),
        ("nano/ppo", "steps_per_generation", "use num_mini_batches"),
        ("nano/ppo", "disable_dropout", "use adapter.dropout: 0 by default"),
        ("nano/ppo", "whiten_advantages", "advantages are always whitened"),
        ("nano/grpo", "batch_size", "use global_batch_size: answers of an optimizer step"),
        ("nano/grpo", "normalize_advantages", "use loss.normalize_advantages: requires loss=rloo"),
        ("nano/ppo", "lmbda", "use loss.lam"),
        ("nano/ppo", "loss.epsilon", "use loss.cliprange"),
        ("nano/ppo", "reward_model_path", "use rewards: [{kind: reward_model"),
        ("nano/dpo", "beta", "'beta' is a key of loss: write loss.beta"),
        ("nano/dpo", "loss.0.smoothing", "use loss.0.label_smoothing"),
        ("nano/dpo", "label_smoothing", "'label_smoothing' is a key of loss: write loss.label_smoothing"),
        (
            "nano/dpo",
            "label_smoothing_factor",
            "which this recipe does not use; recipe sft has loss.label_smoothing",
        ),
        ("nano/tools_lora", "label_smoothing_factor", "use loss.label_smoothing: of cross-entropy"),
        ("nano/generate", "batch_size", "use max_num_seqs"),
        ("nano/rejection_sampling", "rewards.0.max_concurrency", "use rewards.0.num_workers"),
        ("nano/generate", "load_in_4bit", "use quantization: set quantization=nf4"),
        ("nano/known", "max_completion_length", "use sampling.max_new_tokens"),
        ("nano/dpo", "optimizer.learning_rate", "use optimizer.lr"),
        ("nano/distill", "lmbda", "'lmbda' is a key of on_policy"),
        ("nano/distill", "temperature", "use loss.temperature"),
        ("nano/distill", "beta", "use loss.beta: requires loss=jensen_shannon"),
        ("nano/distill", "max_completion_length", "use on_policy.max_new_tokens"),
        ("nano/dpo", "max_completion_length", "use data.max_length"),
        ("nano/reward", "batch", "use global_batch_size"),
        ("nano/reward", "loss.center", "use loss.center_rewards_coefficient"),
        ("nano/reward", "data.too_long", "use data.excess_length_strategy"),
        ("nano/dpo", "data.length", "use data.max_length"),
        ("nano/tools_lora", "num_labels", "only recipe reward has classes"),
        ("nano/tools_lora", "adapter.lora_bias", "is not supported"),
        ("nano/tools_lora", "loss_type", "--import FILE.py"),
        ("nano/tools_lora", "run_name", "use output_dir: names the run, as does report_to='[{kind: wandb, name"),
        ("nano/tools_lora", "eval_strategy", "eval_data=null turns evaluation off"),
        ("nano/tools_lora", "lr_scheduler._component_", "such as lr_scheduler.kind=cosine"),
        ("nano/tools_lora", "mask_history", "set data.train_on=last"),
        ("nano/tools_lora", "exclude_modules", "use adapter.target_modules: regular expressions"),
        ("nano/dpo", "pref_loss", "set loss=sigmoid, ipo"),
    ],
)
def test_foreign_key_names_the_right_key(config: str, key: str, expected: str) -> None:
    line = single_error(config, f"{key}=1")
    assert f"{key}: unknown key" in line and expected in line


@pytest.mark.parametrize(
    ("config", "key", "expected"),
    [
        ("nano/grpo", "data.num_workers", "use data.num_proc"),
        ("nano/grpo", "eval_data.num_workers", "use data.num_proc"),
        ("nano/grpo", "data.eos_token_id", "available keys: "),
        ("nano/grpo", "data.tools", "available keys: "),
        ("nano/grpo", "rewards.0.temperature", "belongs to kind llm_judge"),
        ("nano/ppo", "adapter.target", "available keys: trainable_modules"),
        ("nano/ppo", "optimizer.beta", "'betas'?"),
        ("nano/grpo", "loss.kl_coeff", "use loss.beta"),
        ("nano/grpo", "sampling.stop_token_ids", "use sampling.stop_strings: "),
        ("nano/grpo", "rewards.0.reward_weights", "use rewards.0.weight: "),
    ],
)
def test_hint_for_a_key_of_a_section_is_about_this_section(config: str, key: str, expected: str) -> None:
    line = single_error(config, f"{key}=1")
    assert f"{key}: unknown key" in line and expected in line


@pytest.mark.parametrize("key", ["memory_mb", "file_mb", "output_kb"])
def test_limits_of_the_sandbox_are_named(key: str) -> None:
    unit_tests = f"rewards=[{{kind: unit_tests, sandbox: {{{key}: 64}}}}]"
    assert f"sandbox.{key}: unknown key. Did you mean 'max_{key}'?" in single_error("nano/grpo", unit_tests)


# Keys of PPOConfig in TRL 0.29, and of earlier versions; TRL 1 has no PPO trainer.
TRL_PPO_KEYS = """
    exp_name reward_model_path model_adapter_name ref_adapter_name num_ppo_epochs whiten_rewards kl_coef kl_estimator
    cliprange vf_coef cliprange_value gamma lam ds3_gather_for_generation run_name dataset_num_proc num_mini_batches
    total_episodes local_rollout_forward_batch_size num_sample_generations response_length stop_token stop_token_id
    temperature missing_eos_penalty sft_model_path world_size num_total_batches local_batch_size batch_size
    local_mini_batch_size mini_batch_size
    steps adap_kl_ctrl init_kl_coef kl_penalty target horizon ratio_threshold use_score_scaling use_score_norm
    score_clip compare_steps early_stopping target_kl optimize_cuda_cache forward_batch_size ppo_epochs is_peft_model
    backward_batch_size tracker_project_name log_with disable_dropout ref_model
"""
# Keys of the configs of torchtune's PPO and GRPO recipes.
TORCHTUNE_PPO_KEYS = """
    batch_size num_steps ppo_epochs ppo_batch_size gradient_accumulation_steps enable_activation_checkpointing dtype
    forward_batch_size max_generated_tokens temperature top_k min_response_length penalise_no_eos reward_penalty
    stop_token_ids whiten_rewards gamma lmbda kl_coeff checkpointer value_checkpointer reward_checkpointer
    ref_policy_checkpointer policy_model reward_and_value_model loss.epsilon loss.value_coeff loss.value_clip_range
    optimizer_in_bwd log_peak_memory_stats metric_logger log_every_n_steps resume_from_checkpoint dataset shuffle
"""
TORCHTUNE_GRPO_KEYS = """
    name base_model_path checkpointer ref_checkpointer batch_size grpo_samples forward_batch_size max_generated_tokens
    top_k temperature ppo_epochs num_steps clip_grad_norm save_every_n_epochs reward_fn reward_functions dataset
    shuffle replay_buffer_size steps_before_sync num_trainer_workers num_ref_workers num_fsdp_workers vllm
    orchestration inference postprocessing log_peak_memory_stats loss.kl_coeff enable_activation_offloading dtype
    debug_logging_enabled debug_num_samples_per_step total_inference_batch_size resume_from_checkpoint
"""
# Keys of earlier versions of TrainingArguments, and of common configs of axolotl and LLaMA-Factory.
EARLIER_TRANSFORMERS_KEYS = """
    evaluation_strategy overwrite_output_dir logging_dir save_safetensors group_by_length include_tokens_per_second
    push_to_hub_model_id push_to_hub_token no_cuda
"""
AXOLOTL_KEYS = """
    base_model model_type tokenizer_type trust_remote_code load_in_8bit load_in_4bit strict datasets test_datasets
    dataset_prepared_path val_set_size dataset_processes shuffle_merged_datasets sequence_len pad_to_sequence_len
    sample_packing eval_sample_packing lora_model_dir lora_r lora_alpha lora_dropout lora_target_modules
    lora_target_linear lora_modules_to_save lora_fan_in_fan_out lora_mlp_kernel peft_use_dora peft_use_rslora
    peft_layers_to_transform relora_steps wandb_project wandb_entity wandb_watch wandb_name wandb_run_id wandb_mode
    wandb_log_model mlflow_experiment_name use_tensorboard gradient_accumulation_steps eval_batch_size num_epochs
    warmup_ratio learning_rate logging_steps evals_per_epoch saves_per_epoch train_on_inputs group_by_length
    gradient_checkpointing gradient_checkpointing_kwargs cosine_min_lr_ratio optim_args flash_attention sdp_attention
    xformers_attention attn_implementation resume_from_checkpoint auto_resume_from_checkpoints local_rank
    special_tokens tokens fsdp fsdp_config deepspeed debug chat_template_jinja default_system_message bf16 tf32 plugins
    liger_rope liger_rms_norm liger_fused_linear_cross_entropy rl unfrozen_parameters noisy_embedding_alpha
    sequence_parallel_degree pretraining_dataset dataloader_num_workers excess_length_strategy embedding_lr
    lr_scheduler._component_ loss._component_
"""
LLAMA_FACTORY_KEYS = """
    model_name_or_path adapter_name_or_path stage do_train do_eval do_predict finetuning_type lora_target lora_rank
    pissa_init additional_target freeze_trainable_layers use_galore pure_bf16 plot_loss pref_beta pref_loss ref_model
    reward_model dataset dataset_dir template cutoff_len train_on_prompt mask_history mix_strategy overwrite_cache
    preprocessing_num_workers val_size neat_packing tool_format default_system enable_thinking tokenized_path
    overwrite_output_dir predict_with_generate quantization_bit double_quantization flash_attn use_unsloth
    enable_liger_kernel moe_aux_loss_coef disable_gradient_checkpointing train_from_scratch resize_vocab add_tokens
    rope_scaling cache_dir use_fast_tokenizer use_swanlab early_stopping_steps disable_shuffling use_dft_loss
"""


def names_of_fields(*config_classes: type) -> set[str]:
    return {field.name for config_class in config_classes for field in dataclasses.fields(config_class)}


OWN_TRL_KEYS = names_of_fields(GRPOConfig, RLOOConfig) - names_of_fields(TrainingArguments)
DEDICATED_ANSWER = re.compile(r"unknown key; (?!available keys)|unknown key: '\w+' is a key of")


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("grpo", OWN_TRL_KEYS),
        ("ppo", TRL_PPO_KEYS.split()),
        ("ppo", TORCHTUNE_PPO_KEYS.split()),
        ("grpo", TORCHTUNE_GRPO_KEYS.split()),
        ("sft", sorted(names_of_fields(TrainingArguments, SFTConfig, LoraConfig))),
        ("sft", EARLIER_TRANSFORMERS_KEYS.split() + AXOLOTL_KEYS.split()),
        ("sft", LLAMA_FACTORY_KEYS.split()),
    ],
)
def test_keys_of_other_trainers_work_or_have_an_answer(recipe: str, keys: Collection[str]) -> None:
    """No key gets a guess by similar spelling, or a list of all keys."""
    without_hint = [key for key in keys if shown_hint(key, recipe) is None]
    lines = config_errors(recipe, *(f"{key}=1" for key in without_hint))
    assert not [line for line in lines if "unknown key" in line and not DEDICATED_ANSWER.search(line)]
    assert len(keys) - len(without_hint) > 20


def single_error(config: str, override: str) -> str:
    """The only error of a config with this override."""
    path = registry.find_config(config)
    recipe = read_recipe(path)
    assert recipe is not None
    with pytest.raises(ConfigError) as caught:
        load_config(recipe_loader.load_recipe(recipe).CONFIG, path, [override])
    (line,) = caught.value.lines
    return line


@pytest.mark.parametrize(
    ("config", "override", "expected"),
    [
        (
            "nano/distill",
            "teacher=g/teacher",
            "Available: online or offline; for the model 'g/teacher', write teacher.model=g/",
        ),
        ("nano/dpo", "data=my.jsonl", "; for the source 'my.jsonl', write data.source=my.jsonl"),
        ("nano/dpo", "loss=dop", "'dpo'? Available: for pairs, compared with a reference: dpo, sigmoid"),
        (
            "nano/dpo",
            "loss=dop",
            "; for pairs, without a reference: sft, cpo, simpo, alphapo, orpo; for single answers",
        ),
        ("nano/dpo", "loss=dop", "that are marked: kto, bco, apo_zero_unpaired"),
        ("nano/tools_lora", "data.train_on=assistent", "'assistant'?"),
        ("nano/tools_lora", "precision.compute_dtype=torch.bfloat16", "'bf16'?"),
        ("nano/tools_lora", "precision.compute_dtype=float16", "'fp16'?"),
        ("nano/grpo", "rewards=my_rewards.py", "Write my_rewards.py:NAME"),
        ("nano/tools_lora", "optimizer=paged_adamw_32bit", "'adamw'?"),
        ("nano/tools_lora", "report_to=none", "a list is written []"),
        ("nano/tools_lora", "eval_every=no", "eval_data=null"),
        ("nano/tools_lora", "save_every=no", "saves only the last training state"),
        ("nano/tools_lora", "max_steps=-1", "or null"),
        ("nano/tools_lora", "push_to_hub=true", "push_to_hub.repo_id="),
        ("nano/tools_lora", "data.max_length=null", "max_position_embeddings"),
        ("nano/tools_lora", "epochs=0.5", "max_steps=N"),
        ("nano/tools_lora", "epochs=3.0", "write 3"),
        ("nano/tools_lora", "loss=dft", "--import FILE.py"),
        ("nano/tools_lora", "adapter.target_modules=q_proj,v_proj", "Write a list: [q_proj,v_proj]"),
        ("nano/tools_lora", "optimizer={kind: adamw, betas: 0.9}", "[0.9, ...]"),
        ("nano/tools_lora", "optimizer={kind: adamw, betas: '(0.9,0.95)'}", "written [0.9,0.95]"),
        ("nano/tools_lora", "experiment_name=x", "write report_to='[{kind: mlflow, experiment_name: ...}]'"),
    ],
)
def test_value_that_is_no_kind_gets_a_hint(config: str, override: str, expected: str) -> None:
    assert expected in single_error(config, override)


@pytest.mark.parametrize(
    ("recipe", "text", "overrides", "expected"),
    [
        ("sft", "data: {kind: alpaca, source: rows.jsonl}\n", (), "data.kind: unknown kind 'alpaca'"),
        ("sft", "data: {source: rows.jsonl}\n", ("data.kind=alpaca",), "data.kind: unknown kind 'alpaca'"),
        (
            "distill",
            "data: {source: s}\nteacher: {kind: stored_once, model: x, logits_dir: f}\n",
            (),
            "teacher.kind: unknown kind 'stored_once'",
        ),
    ],
)
def test_explicit_unknown_kind_gets_no_other_hint(recipe: str, text: str, overrides, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe_loader.load_recipe(recipe).CONFIG, f"model: m\noutput_dir: o\n{text}", overrides)
    (line,) = caught.value.lines
    assert expected in line and "write" not in line


def test_key_of_a_list_element_is_found() -> None:
    text = REQUIRED_OPTIONS["sft"] + "loss: [sft, {kind: dpo, weight: 0.5}]\n"
    with pytest.raises(ConfigError) as caught:
        load_config(recipe_loader.load_recipe("preference").CONFIG, text, ["label_smoothing=0.1"])
    assert "'label_smoothing' is a key of loss" in caught.value.lines[0]
    load_config(recipe_loader.load_recipe("preference").CONFIG, text, ["loss.1.label_smoothing=0.1"])


def test_hint_for_a_file_is_yaml() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            recipe_loader.load_recipe("distill").CONFIG,
            "model: m\ndata: {source: s}\noutput_dir: o\nteacher: g/teacher\n",
        )
    assert caught.value.lines[0].endswith("; for the model 'g/teacher', write teacher: {model: g/teacher}")
    with pytest.raises(ConfigError) as caught:
        load_config(
            recipe_loader.load_recipe("distill").CONFIG, "model: m\ndata: {source: s}\noutput_dir: o\nteacher: onlin\n"
        )
    assert caught.value.lines[0].endswith("'online'? Available: online or offline")


def test_suggested_losses_exist() -> None:
    slot = next(
        slot
        for path, slot in iter_slots(recipe_loader.load_recipe("preference").CONFIG, ChoiceRegistry())
        if path == ("loss", "0")
    )
    assert set(RECIPES[0][0].split()) <= set(ChoiceRegistry().kinds(slot))
    for name in (name for names, _ in RECIPES for name in names.split()):
        if match := re.search(r"tune run (\w+) CONFIG (loss=\S+)", suggest_recipe(name) or ""):
            assert not config_errors(match[1], match[2]), name
    for names, _ in RECIPES:
        assert not set(names.split()) & set(registry.list_recipes())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dpo", "it is a loss of recipe preference: tune run preference CONFIG loss=dpo"),
        ("KTO", "tune run preference CONFIG loss=kto"),
        ("rloo", "tune run grpo CONFIG loss=rloo"),
        ("rlhf", "recipes grpo and ppo train on rewards of sampled answers"),
        ("prm", "tune run reward CONFIG loss=process_reward"),
        ("rm", "tune run reward CONFIG loss=bradley_terry"),
        ("regression", "tune run reward CONFIG loss=regression"),
        ("full_dpo_distributed", "with adapter=none"),
        ("full_finetune_single_device", "tune run sft llama3_2/1b_full"),
    ],
)
def test_foreign_recipe_name_gets_a_hint(name: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", name, "nano/dpo"]) == 2
    assert f"error: no recipe '{name}': " in (err := capsys.readouterr().err) and expected in err
    assert suggest_recipe("sft") is None


def test_suggested_configs_exist() -> None:
    paths = {text.strip(",:") for _, hint in RECIPES for text in hint.split() if "/" in text}
    assert paths <= set(registry.list_configs())
    commands = [re.findall(r"tune run (\w+) (\w+/\w+)((?: \S+=\S+)*)", hint) for _, hint in RECIPES]
    assert sum(map(len, commands)) > 4
    for recipe, config, overrides in (command for group in commands for command in group):
        path = registry.find_config(config)
        assert read_recipe(path) == recipe
        load_config(recipe_loader.load_recipe(recipe).CONFIG, path, overrides.split())


@pytest.mark.parametrize(
    ("page", "configs"),
    [("reward", (RewardConfig,)), ("distill", (GKDConfig, DistillationConfig)), ("preference", (DPOConfig, KTOConfig))],
)
def test_docs_tables_contain_keys_and_defaults_of_trl(page: str, configs: tuple[type, ...]) -> None:
    """The first column contains keys of TRL, with defaults in parentheses."""
    fields = [
        (field.name, field.default)
        for config_class in (TrainingArguments, *configs)
        for field in dataclasses.fields(config_class)
    ]
    text = (DOCS / f"{page}.md").read_text().partition("## Migration from TRL")[2]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = {code.partition("=")[0] for row in rows for code in row.split("`")[1::2] if code[0].islower()}
    assert len(names) > 4 and names - KEYS_OUTSIDE_CONFIGS <= {name for name, _ in fields}
    for name, brackets in (match for row in rows for match in re.findall(r"`([a-z_]+)`,? \(([^)]*\d[^)]*)\)", row)):
        assert {float(number) for number in re.findall(r"(?<!\w)[\d.]+(?:e-\d+)?", brackets)} <= {
            float(default) for field, default in fields if field == name and isinstance(default, int | float)
        }, name
