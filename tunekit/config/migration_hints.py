"""Replacements for keys and recipes of other trainers (TRL, PEFT, torchtune, axolotl, LLaMA-Factory,
sentence-transformers) and tunekit 0.1.

Identical names need no entry: they work, or the error names the section that has the key.
"""

from collections.abc import Collection, Sequence

from tunekit.config.key_hint import Key, KeyHint
from tunekit.config.policy_hints import POLICY_KEYS

NOTED_KEYS = (
    KeyHint("learning_rate", "optimizer.lr"),
    KeyHint("optim", "optimizer", "adamw, adamw8bit, muon or sgd"),
    KeyHint("lr_scheduler_type", "lr_scheduler", "cosine, linear, constant or wsd"),
    KeyHint("warmup_ratio num_warmup_steps", "lr_scheduler.warmup_steps", "a value below 1 is a fraction of all steps"),
    KeyHint("clip_grad_norm gradient_clipping", "max_grad_norm", "0 disables clipping"),
    KeyHint(
        "per_device_train_batch_size train_batch_size batch_size",
        "micro_batch_size",
        "`global_batch_size` is the number of rows per optimizer step over all devices",
    ),
    KeyHint(
        "gradient_accumulation_steps accumulation_steps",
        "global_batch_size",
        "rows per optimizer step over all devices: `micro_batch_size` x devices x accumulation steps",
        "micro_batch_size",
    ),
    KeyHint("num_train_epochs num_epochs", "epochs"),
    KeyHint("max_steps_per_epoch", "max_steps", "optimizer steps of the whole run"),
    KeyHint("save_steps", "save_every"),
    KeyHint("eval_steps run_val_every_n_steps", "eval_every", "in optimizer steps, or a fraction of them"),
    KeyHint("logging_steps log_every_n_steps", "log_every"),
    KeyHint("metric_logger", "report_to", "a list, such as [wandb]"),
    KeyHint("wandb_project", "report_to", "[{kind: wandb, project: NAME}]"),
    KeyHint("hub_model_id", "push_to_hub.repo_id"),
    KeyHint("model_name_or_path base_model pretrained_model_name_or_path", "model"),
    KeyHint("model_max_length max_seq_len max_seq_length sequence_len cutoff_len", "data.max_length", "in tokens"),
    KeyHint("max_prompt_length", "data.max_prompt_length", "longer prompts are dropped"),
    KeyHint("max_prompt_length", "data.max_length", "limits prompt plus answer; prompts have no separate limit"),
    KeyHint("max_completion_length", "on_policy.max_new_tokens", "limits the answers that the student generates"),
    KeyHint(
        "max_completion_length max_target_length max_generated_tokens",
        "sampling.max_new_tokens",
        "limits generated answers",
    ),
    KeyHint(
        "max_completion_length max_target_length",
        "data.max_length",
        "limits prompt plus answer; answers have no separate limit",
    ),
    KeyHint("dataset datasets dataset_name dataset_path train_file", "data.source"),
    KeyHint("eval_dataset dataset_val val_set_size", "eval_data", "rows as in `data`, with another `split`"),
    KeyHint("packed sample_packing", "data.packing"),
    KeyHint("chat_template_path chat_template", "data.chat_template"),
    KeyHint("chat_template_kwargs", "data.chat_template_kwargs"),
    KeyHint(
        "train_on_inputs train_on_input completion_only_loss assistant_only_loss masking_strategy roles_to_train",
        "data.train_on",
        "prompts are never trained on; of the answers: assistant, last, per_message, or a list of roles",
        "data.chosen_column",
    ),
    KeyHint(
        "train_on_inputs train_on_input completion_only_loss assistant_only_loss masking_strategy roles_to_train",
        "data.train_on",
        "assistant, last, all, per_message, or a list of roles",
    ),
    KeyHint("peft_config use_peft use_lora", "adapter", "set adapter=lora"),
    KeyHint("lora_r lora_rank", "adapter.rank", "requires adapter=lora"),
    KeyHint("lora_alpha", "adapter.alpha", "requires adapter=lora"),
    KeyHint("lora_dropout", "adapter.dropout", "requires adapter=lora"),
    KeyHint(
        "lora_target_modules lora_attn_modules",
        "adapter.target_modules",
        "requires adapter=lora; a list, or `all-linear`",
    ),
    KeyHint("use_dora", "adapter", "set adapter=dora"),
    KeyHint(
        "load_in_4bit quantize_base quantization_config",
        "quantization",
        "set quantization=nf4 adapter=lora for QLoRA",
        "adapter",
    ),
    KeyHint("load_in_4bit quantize_base quantization_config", "quantization", "set quantization=nf4"),
    KeyHint(
        "gradient_checkpointing enable_activation_checkpointing",
        "memory.activation_checkpointing",
        "none, full or selective",
    ),
    KeyHint("enable_activation_offloading", "memory.activation_offloading"),
    KeyHint("torch_compile", "compile"),
    KeyHint("bf16 fp16 dtype torch_dtype", "precision.compute_dtype", "auto, bf16, fp16 or fp32"),
    KeyHint(
        "resume_from_checkpoint auto_resume",
        "",
        "the same command resumes the run; --overwrite trains again",
        "save_every",
    ),
    KeyHint(
        "deepspeed fsdp fsdp_config",
        "parallel",
        "weights are sharded with FSDP2 by default: tune run --nproc-per-node N",
        "micro_batch_size",
    ),
    KeyHint(
        "deepspeed fsdp fsdp_config",
        "parallel",
        "each device has a copy of the model by default: tune run --nproc-per-node N; parallel.dp_shard=N shards it",
    ),
    # numbers and details of the optimizer, schedule and loop
    KeyHint("adam_beta1 adam_beta2", "optimizer.betas", "[0.9, 0.95]"),
    KeyHint("adam_epsilon", "optimizer.eps"),
    KeyHint("optim_args", "optimizer", "its arguments are keys of this section"),
    KeyHint("lr_scheduler_kwargs", "lr_scheduler", "its arguments are keys of this section"),
    KeyHint(
        "per_device_eval_batch_size batch_size_val eval_batch_size",
        "micro_batch_size",
        "also of evaluation",
        "eval_data",
    ),
    KeyHint("eval_strategy", "eval_every", "a number of optimizer steps, or epoch"),
    KeyHint("log_completions", "num_completions_to_print", "all answers are in a file of the run", "num_generations"),
    KeyHint(
        "predict_with_generate log_completions generation_config eval_table_size eval_max_new_tokens",
        "generation_eval",
        "a section: {prompts: [...], sampling: {max_new_tokens: 128}}",
    ),
    KeyHint("batch_size", "max_num_seqs", "", "num_return_sequences"),
    KeyHint("do_sample", "sampling.temperature", "0: greedy decoding"),
    KeyHint("stop until", "sampling.stop_strings", "a list of texts"),
    KeyHint("num_beams", "sampling", "answers are sampled or greedy; there is no beam search"),
    KeyHint("special_tokens", "new_special_tokens", "tokens that are added to the tokenizer, with texts or null"),
    KeyHint("resize_token_embeddings", "new_tokens", "added tokens resize the embeddings"),
    KeyHint("eval_on_start", "eval_data", "is always evaluated before the first step"),
    KeyHint("save_strategy save_every_n_epochs", "save_every", "a number of optimizer steps, or epoch"),
    KeyHint("save_only_model save_adapter_weights_only", "save_total_limit", "training states are apart from `final/`"),
    KeyHint("logging_strategy", "log_every", "a number of optimizer steps"),
    KeyHint("full_determinism cudnn_deterministic_mode", "deterministic"),
    KeyHint("data_seed", "seed", "of data order, dropout and initialization"),
    KeyHint("use_cpu no_cuda", "device", "set device=cpu"),
    KeyHint("tf32", "precision.compute_dtype", "set precision.compute_dtype=tf32"),
    KeyHint("ddp_timeout", "parallel.hang_timeout_seconds"),
    KeyHint("tensor_parallel_dim tensor_parallel_size", "parallel.tp"),
    KeyHint("context_parallel_dim context_parallel_size", "parallel.cp"),
    KeyHint("data_parallel_shard_dim", "parallel.dp_shard"),
    KeyHint("data_parallel_replicate_dim", "parallel.dp_replicate"),
    KeyHint("fsdp_cpu_offload", "parallel.cpu_offload"),
    KeyHint("ac_mode", "memory.activation_checkpointing", "none, full or selective"),
    KeyHint("hub_revision", "push_to_hub.revision"),
    KeyHint("hub_private_repo", "push_to_hub.private"),
    KeyHint("hub_strategy", "push_to_hub.push_every", "a number of optimizer steps; null pushes the result only"),
    KeyHint("exp_name", "output_dir", "names the run"),
    KeyHint("log_peak_memory_stats", "", "is always logged"),
    # model and data
    KeyHint("disable_dropout", "adapter.dropout", "0 by default; other parts of a model have no dropout"),
    KeyHint(
        "model_init_kwargs", "config_overrides", "a mapping of keys of the model config; dtypes are in `precision`"
    ),
    KeyHint("trust_remote_code", "", "code from model repositories is never run"),
    KeyHint("cast_lm_head_to_fp32", "precision.compute_dtype", "probabilities are always computed in fp32"),
    KeyHint("pad_to_multiple_of", "", "has no effect on results, and is not needed"),
    KeyHint("base_model_path", "model", "a directory or a name on the Hub"),
    KeyHint("checkpointer", "model", "a directory or a name on the Hub; its files are found"),
    KeyHint("overrides_of_model_config rope_scaling", "config_overrides", "a mapping of keys of the model config"),
    KeyHint("model_revision", "model", "NAME@REVISION"),
    KeyHint("dataset_text_field", "data.text_column", "of recipe sft with data.kind=text"),
    KeyHint("dataset_num_proc preprocessing_num_workers data.num_workers", "data.num_proc"),
    KeyHint("shuffle_dataset", "data.shuffle"),
    KeyHint("padding_free packing_strategy eval_packing", "data.packing"),
    KeyHint("truncation_mode", "data.excess_length_strategy", "truncate (from the right), drop or split"),
    # adapters
    KeyHint("r", "adapter.rank", "requires adapter=lora"),
    KeyHint("init_lora_weights", "adapter.init", "default or pissa; requires adapter=lora"),
    KeyHint("lora_bias", "adapter.bias", "none, lora_only or all"),
    KeyHint("unfrozen_parameters", "adapter.trainable_modules", "patterns of modules; requires adapter=none"),
    KeyHint("embedding_lr lr_groups", "optimizer.lr_pattern", "{embed_tokens: 1e-6}"),
    KeyHint("ensure_weight_tying", "adapter.untie_embeddings", "negated: embeddings stay tied by default"),
    # preference
    KeyHint(
        "ref_model ref_model_name_or_path reference_model",
        "reference",
        "always the initial policy, never another model: disable_adapter, copy or precomputed",
    ),
    KeyHint("precompute_ref_log_probs", "reference", "set reference=precomputed"),
    KeyHint("precompute_ref_batch_size", "reference", "set reference=precomputed; uses `micro_batch_size`"),
    KeyHint(
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "reference",
        "the reference is always the initial policy and is never updated",
    ),
    KeyHint("loss_type rl", "loss", "set loss=ipo, or a list of losses", "reference"),
    KeyHint("loss_type", "loss", "forward_kl, reverse_kl, jensen_shannon or another divergence", "teacher"),
    KeyHint("loss_type", "loss"),
    KeyHint("loss_weights", "loss.weight", "one per loss: loss='[{kind: dpo, weight: 0.8}, sft]'"),
    KeyHint("rl_beta", "loss.beta", "", "reference"),
    KeyHint(
        "reward_weights reward_funcs",
        "",
        "reward functions belong to recipe grpo; in a sum of losses (recipe preference) each loss has a `weight`",
    ),
    KeyHint("label_smoothing_factor", "loss.label_smoothing", "of cross-entropy", "loss.z_loss"),
    KeyHint(
        "label_smoothing_factor",
        "",
        "smooths the targets of cross-entropy, which this recipe does not use; recipe sft has loss.label_smoothing",
    ),
    KeyHint("f_divergence_type", "loss.f_divergence"),
    KeyHint("f_alpha_divergence_coef", "loss.f_divergence", "{kind: alpha_divergence, alpha: 0.5}"),
    # reward
    KeyHint("num_labels", "", "only recipe reward has classes: loss=classification loss.num_labels=N"),
    KeyHint(
        "id2label label2id",
        "data.class_names",
        "the names in their order; requires loss=classification data.kind=labeled",
    ),
    # embed
    KeyHint("temperature", "loss.scale", "1 / temperature", "loss.partition_mode"),
    KeyHint(
        "gather_across_devices negatives_cross_device",
        "",
        "always on: the documents of all devices compete in the loss",
        "loss.partition_mode",
    ),
    KeyHint(
        "mini_batch_size",
        "micro_batch_size",
        "the loss compares all `global_batch_size` rows of a step; gradients of embeddings are always cached",
        "loss.partition_mode",
    ),
    KeyHint("pooling_mode pooling_method sentence_pooling_method", "pooling", "lasttoken, mean or cls"),
    KeyHint("normalize_embeddings", "normalize"),
    KeyHint("prompts query_instruction query_instruction_for_retrieval", "data.query_prompt", "", "pooling"),
    KeyHint("passage_instruction passage_instruction_for_retrieval", "data.document_prompt", "", "pooling"),
    KeyHint("train_group_size", "data.num_negatives", "hard negatives only: train_group_size - 1", "pooling"),
    KeyHint("query_max_len passage_max_len query_max_length passage_max_length", "data.max_length", "of each text"),
    # distill
    KeyHint("teacher_model_name_or_path teacher_model teacher_checkpointer", "teacher.model"),
    KeyHint("teacher_model_revision", "teacher.model", "NAME@REVISION"),
    KeyHint("teacher_model_init_kwargs", "teacher", "its `quantization` and `precision` define how it is stored"),
    KeyHint("seq_kd", "", "generate the teacher's answers with recipe generate first, then train on these rows"),
    KeyHint(
        "temperature",
        "loss.temperature",
        "of both token distributions; the student samples with on_policy.temperature, which is what GKDTrainer calls "
        "temperature, while DistillationTrainer uses one value for both",
        "teacher",
    ),
    KeyHint("top_p", "on_policy.top_p", "", "teacher"),
    KeyHint("top_k", "on_policy.top_k", "0 for all tokens"),
    KeyHint("beta", "loss.beta", "requires loss=jensen_shannon; 0 is forward_kl and 1 reverse_kl", "teacher"),
    KeyHint(
        "alpha",
        "loss.kd_ratio",
        "the weight of the distillation loss; loss.alpha is the skew of skewed_kl, adapter.alpha the scale of LoRA",
        "teacher",
    ),
    # tunekit 0.1, where more than the name has changed
    KeyHint("checks", "data_checks", "error or warn"),
    KeyHint("log", "log_every", "and `report_to`"),
    KeyHint("raw", "apply_chat_template", "negated: set apply_chat_template=false"),
    KeyHint("memory.recompute recompute", "memory.activation_checkpointing", "none, full or selective"),
    KeyHint("gather", "parallel.all_gather_dtype", "param or compute"),
    KeyHint("bad_rows", "data.on_bad_row", "error or skip"),
    KeyHint("loss.per", "loss.reduction", "token_mean or sequence_mean"),
    KeyHint("truth", "loss.kd_ratio", "1 - truth"),
)

# Keys of tunekit 0.1, by the section of the new key: old=new. As in `KeyHint.names`, `section.key` matches in this
# section only.
RENAMED_KEYS = {
    "": (
        "out=output_dir out=output_path validation=eval_data weights=quantization schedule=lr_scheduler "
        "log.every=log_every log.to=report_to guard=step_guard profile=profiler push=push_to_hub "
        "micro_batch=micro_batch_size batch=global_batch_size batch=batch_size batch=max_num_seqs steps=max_steps "
        "clip=max_grad_norm save_async=async_save keep=save_total_limit validate_every=eval_every "
        "patience=early_stopping_patience "
        "tail=ld_alpha shots=num_fewshot include=include_path chat=apply_chat_template memory.compile=compile "
        "examples=num_completions_to_print system=system_prompt"
    ),
    "on_policy": "on_policy.batch=batch_size on_policy.share=lmbda on_policy.tokens=max_new_tokens",
    "profiler": "profiler.steps=active profiler.start=skip_first profiler.memory=profile_memory",
    "memory": "memory.offload=activation_offloading step_in_backward=optimizer_in_bwd",
    "precision": "compute=compute_dtype trained=master_dtype frozen=frozen_dtype",
    "quantization": "nested=double_quant",
    "adapter": (
        "targets=target_modules rslora=use_rslora plus=loraplus_lr_ratio adapter.start=adapter_path ranks=rank_pattern "
        "alphas=alpha_pattern whole=modules_to_save untie=untie_embeddings"
    ),
    "optimizer": "optimizer.decay=weight_decay",
    "lr_scheduler": "lr_scheduler.decay=decay_ratio warmup=warmup_steps floor=min_lr_ratio",
    "parallel": (
        "replicate=dp_replicate shard=dp_shard context=cp tensor=tp expert=ep reshard=reshard_after_forward "
        "prefetch=prefetch_layers parallel.offload=cpu_offload timeout=hang_timeout_seconds"
    ),
    "step_guard": (
        "nan=on_nan spike=spike_factor of=spike_metric window=spike_window step_guard.answer=on_spike "
        "step_guard.most=max_interventions"
    ),
    "forgetting": "forgetting.every=eval_every forgetting.most=max_loss_increase forgetting.answer=on_exceed",
    "push_to_hub": "repo=repo_id push_to_hub.every=push_every branch=revision merged=merge_adapter",
    "data": (
        "length=max_length pack=packing data.limit=max_samples too_long=excess_length_strategy "
        "most_bad=max_bad_row_fraction stream=streaming workers=num_proc data.template=chat_template learn=train_on "
        "data.end=eos_token data.parts=datasets parts=datasets data.messages=messages_column "
        "data.conversations=conversations_column data.prompt=prompt_column data.completion=completion_column "
        "data.completions=completions_column data.response=response_column data.input=input_column "
        "data.system=system_prompt data.column=text_column data.text=text_column data.chosen=chosen_column "
        "data.rejected=rejected_column data.margin=margin_column data.label=label_column data.labels=labels_column "
        "data.classes=class_names separator=step_separator"
    ),
    "loss": (
        "loss.smoothing=label_smoothing loss.divergence=f_divergence loss.tau=discopop_tau loss.nll=cpo_alpha "
        "loss.gamma=simpo_gamma loss.good=desirable_weight loss.bad=undesirable_weight "
        "loss.center=center_rewards_coefficient loss.classes=num_labels"
    ),
    "teacher": "teacher.weights=quantization teacher.top=top_k teacher.folder=logits_dir",
    "sampling": "sampling.tokens=max_new_tokens",
}
TABLE = (
    *POLICY_KEYS,
    *NOTED_KEYS,
    *(
        KeyHint(old, f"{section}.{new}" if section else new)
        for section, pairs in RENAMED_KEYS.items()
        for old, new in (pair.split("=") for pair in pairs.split())
    ),
)

RENAMED_KINDS = {
    "full": "none",
    "plain": "none",
    "marked": "unpaired_preference",
    "labelled": "labeled",  # vocabulary: ignore
    "stepped": "stepwise",
    "mix": "mixture",
    "rename": "rename_columns",
    "where": "filter",
    "initial": "auto",
    "off": "disable_adapter",
    "cached": "precomputed",
    "bradleyterry": "bradley_terry",
    "process": "process_reward",
    "live": "online",
    "stored": "offline",
    "forwardkl": "forward_kl",
    "reversekl": "reverse_kl",
    "symmetrickl": "symmetric_kl",
    "skewedkl": "skewed_kl",
    "skewedreversekl": "skewed_reverse_kl",
    "jensenshannon": "jensen_shannon",
    "MultipleNegativesRankingLoss": "multiple_negatives_ranking",
    "CachedMultipleNegativesRankingLoss": "multiple_negatives_ranking",
    "infonce": "multiple_negatives_ranking",
    "CoSENTLoss": "cosent",
    "CosineSimilarityLoss": "cosine_similarity",
    "BinaryCrossEntropyLoss": "binary_cross_entropy",
    "4bit": "nf4",
    "int4": "nf4",
    "mnrl": "multiple_negatives_ranking",
    "fp8": "float8",
}
KIND_NOTES = {  # kinds of other trainers that are several keys here
    "qlora": "QLoRA is adapter=lora quantization=nf4",
    "qdora": "QDoRA is adapter=dora quantization=nf4",
}

PREFERENCE = "it is a loss of recipe preference: tune run preference CONFIG loss={name}"
REWARD = "it is a loss of recipe reward: tune run reward CONFIG loss={name}"
ONLINE = (
    "it is not supported; recipes grpo and ppo train on rewards of sampled answers (grpo, dapo, rloo, ppo and others), "
    "recipe preference on pairs and labels (dpo, kto, orpo and others)"
)
POLICY = "it is a loss of recipe grpo: tune run grpo CONFIG loss={name}"
RECIPES = (
    ("dpo ipo kto orpo simpo cpo bco alphapo discopop robust hinge exo_pair sppo_hard apo_zero apo_down", PREFERENCE),
    ("rpo mpo", "it is a sum of losses of recipe preference, such as tune run preference CONFIG loss=[dpo,sft]"),
    ("lora_dpo_single_device lora_dpo_distributed",
     "it is recipe preference: tune run preference llama3_2/1b_dpo_lora"),
    ("full_dpo_distributed",
     "it is recipe preference with adapter=none, which needs a lower optimizer.lr than an adapter: "
     "tune run preference llama3_2/1b_dpo_lora adapter=none optimizer.lr=1e-6"),
    ("dapo gspo bnpo dr_grpo cispo sapo rloo reinforce_pp", POLICY),
    ("reinforce rlvr", "it is recipe grpo: tune run grpo CONFIG"),
    ("grpo_full_finetune_distributed async_grpo_full_finetune_distributed",
     "it is recipe grpo: tune run grpo llama3_2/3b_grpo_gsm8k"),
    ("ppo_full_finetune_single_device", "it is recipe ppo: tune run ppo mistral/7b_ppo_full"),
    ("gmpo online_dpo nash_md xpo rlhf", ONLINE),
    ("rm reward_model reward_modeling", REWARD.format(name="bradley_terry")),
    ("bradley_terry classification regression binary_cross_entropy process_reward", REWARD),
    ("reranker rerank cross_encoder", REWARD.format(name="binary_cross_entropy")),
    ("multiple_negatives_ranking cosent cosine_similarity", "it is a loss of recipe embed: tune run embed nano/embed"),
    ("embedding embeddings sentence_transformer retriever", "it is recipe embed: tune run embed nano/embed"),
    ("prm", REWARD.format(name="process_reward")),
    ("gkd kd distillation minillm knowledge_distillation_single_device knowledge_distillation_distributed",
     "it is recipe distill: tune run distill CONFIG"),
    ("finetune train full full_finetune_single_device full_finetune_distributed",
     "it is recipe sft with adapter=none, as in tune run sft llama3_2/1b_full"),
    ("lora dora lora_finetune_single_device lora_finetune_distributed",
     "it is recipe sft with adapter=lora or dora, as in tune run sft llama3_2/1b_lora"),
    ("qlora qdora", "it is recipe sft with adapter=lora quantization=nf4, as in tune run sft llama3_2/1b_qlora"),
    ("eval eleuther_eval", "it is recipe evaluate: tune run evaluate CONFIG"),
)  # fmt: skip
DATA_SECTIONS = frozenset({"eval_data", "dataset"})


def find_hint(path: Sequence[str], keys: Collection[Key]) -> KeyHint | None:
    """Row for the unknown key at `path` in a recipe with these keys; None if no row applies.

    Rows of policy trainers are about top-level keys: inside a section of the recipe, they apply if they replace a key
    by one of this section.
    """
    names = [*(name for name in path[:-1] if not name.isdecimal()), path[-1]]
    section = "data" if names[:-1] and names[-2] in DATA_SECTIONS else ".".join(names[-2:-1])
    qualified = f"{section}.{names[-1]}" if section else names[-1]
    rows = [row for row in TABLE if row.key in ("", *keys) and row.where in (None, *keys)]
    if row := next((row for row in rows if qualified in row.names.split()), None):
        return row
    head = "data" if names[0] in DATA_SECTIONS else names[0]
    is_known = len(names) > 1 and any(key.startswith(f"{head}.") for key in keys)
    rows = [row for row in rows if not is_known or row not in POLICY_KEYS or row.key.partition(".")[0] == head]
    return next((row for row in rows if names[-1] in row.names.split()), None)


def suggest_recipe(name: str) -> str | None:
    """Replacement for a recipe of another trainer; None if it is unknown."""
    hints = (hint for names, hint in RECIPES if name.lower() in names.split())
    return next((hint.format(name=name.lower()) for hint in hints), None)
