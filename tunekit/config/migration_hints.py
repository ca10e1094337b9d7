"""What other trainers (TRL, torchtune, axolotl) call a key or a recipe, and what stands for it here."""

from collections.abc import Collection
from typing import NamedTuple

Key = str  # a key from the top of a config, as people write it on the command line


class KeyHint(NamedTuple):
    """A line of the table. Of several lines of a name, the first that fits a recipe tells what is meant there.

    One fits where the recipe has the key, and the key `where`; a line without a key fits everywhere.
    """

    names: str  # with spaces between
    key: Key
    how: str = ""  # in what its meaning or use differs
    where: Key | None = None


# Names of several trainers stand side by side where they mean the same.
TABLE = (
    KeyHint("learning_rate", "optimizer.lr"),
    KeyHint("weight_decay", "optimizer.decay", "norms and biases never decay"),
    KeyHint("optim", "optimizer", "adamw, adamw8bit, muon or sgd"),
    KeyHint("lr_scheduler lr_scheduler_type", "schedule", "cosine, linear, constant or wsd"),
    KeyHint("warmup_ratio warmup_steps num_warmup_steps", "schedule.warmup", "steps, or below 1 a share of all steps"),
    KeyHint("max_grad_norm clip_grad_norm gradient_clipping", "clip", "0 turns it off"),
    KeyHint(
        "per_device_train_batch_size train_batch_size batch_size micro_batch_size",
        "micro_batch",
        "`batch` is the rows of one optimizer step over all devices",
    ),
    KeyHint(
        "gradient_accumulation_steps accumulation_steps",
        "batch",
        "the rows of one optimizer step over all devices: `micro_batch` times the devices times the accumulated passes",
        "micro_batch",
    ),
    KeyHint("num_train_epochs num_epochs", "epochs"),
    KeyHint("max_steps", "steps", "optimizer steps, in place of `epochs`"),
    KeyHint("max_steps_per_epoch", "steps", "optimizer steps of the whole run, not of an epoch"),
    KeyHint("save_steps", "save_every"),
    KeyHint("save_total_limit", "keep", "states to resume from; the result is kept beside them"),
    KeyHint("eval_steps run_val_every_n_steps", "validate_every", "in optimizer steps; it needs `validation`"),
    KeyHint("logging_steps log_every_n_steps", "log.every"),
    KeyHint("report_to metric_logger", "log.to", "a list, such as [wandb]"),
    KeyHint("wandb_project", "log.to", "[{kind: wandb, project: NAME}]"),
    KeyHint("output_dir", "out"),
    KeyHint("hub_model_id", "push.repo"),
    KeyHint("model_name_or_path base_model pretrained_model_name_or_path", "model"),
    KeyHint("model_max_length max_seq_len max_seq_length sequence_len cutoff_len", "data.length", "in tokens"),
    KeyHint(
        "max_length", "data.length", "it bounds each answer with its prompt; what is longer is cut at the end", "tail"
    ),
    KeyHint(
        "max_length", "data.length", "`too_long` says what becomes of longer rows: data.too_long=drop leaves them out"
    ),
    KeyHint(
        "max_prompt_length", "data.length", "it bounds prompt and answer together, and nothing bounds a prompt alone"
    ),
    KeyHint("max_completion_length max_new_tokens", "on_policy.tokens", "the longest answer that the student writes"),
    KeyHint("max_completion_length max_new_tokens max_target_length", "sampling.tokens", "the longest answer"),
    KeyHint(
        "max_completion_length max_target_length",
        "data.length",
        "it bounds prompt and answer together, and nothing bounds an answer alone",
    ),
    KeyHint("dataset datasets dataset_name dataset_path train_file", "data.source"),
    KeyHint("eval_dataset dataset_val val_set_size", "validation", "rows as in `data`, perhaps another `split`"),
    KeyHint("packing packed sample_packing", "data.pack"),
    KeyHint("chat_template chat_template_path", "data.template", "a Jinja file; by default the checkpoint's own"),
    KeyHint(
        "train_on_inputs train_on_input completion_only_loss assistant_only_loss masking_strategy",
        "data.learn",
        "nothing of a prompt is learnt; of what is behind it: assistant, last, marked, or a list of roles",
        "data.chosen",
    ),
    KeyHint(
        "train_on_inputs train_on_input completion_only_loss assistant_only_loss masking_strategy",
        "data.learn",
        "assistant, last, all, marked, or a list of roles",
    ),
    KeyHint("peft_config use_peft use_lora", "adapter", "write adapter=lora"),
    KeyHint("lora_r lora_rank", "adapter.rank", "with adapter=lora"),
    KeyHint("lora_alpha", "adapter.alpha", "with adapter=lora"),
    KeyHint("lora_dropout", "adapter.dropout", "with adapter=lora"),
    KeyHint(
        "lora_target_modules target_modules lora_attn_modules", "adapter.targets", "with adapter=lora; a list, or `all`"
    ),
    KeyHint("use_dora", "adapter", "write adapter=dora"),
    KeyHint("use_rslora", "adapter.rslora", "with adapter=lora"),
    KeyHint(
        "load_in_4bit quantize_base quantization_config",
        "weights",
        "write weights=nf4 adapter=lora, which is QLoRA",
        "adapter",
    ),
    KeyHint("load_in_4bit quantize_base quantization_config", "weights", "write weights=nf4"),
    KeyHint("gradient_checkpointing enable_activation_checkpointing", "memory.recompute"),
    KeyHint("activation_offloading enable_activation_offloading", "memory.offload"),
    KeyHint("optimizer_in_bwd", "memory.step_in_backward"),
    KeyHint("torch_compile", "memory.compile"),
    KeyHint("bf16 fp16 dtype torch_dtype", "precision.compute", "bf16 or fp32"),
    KeyHint(
        "resume_from_checkpoint auto_resume",
        "",
        "the same command goes on by itself, and --fresh starts over",
        "save_every",
    ),
    KeyHint(
        "deepspeed fsdp fsdp_config",
        "parallel",
        "several devices share the weights by themselves: tune run --gpus N",
        "micro_batch",
    ),
    KeyHint(
        "deepspeed fsdp fsdp_config",
        "parallel",
        "several devices share the rows by themselves: tune run --gpus N; with parallel.shard=N they share the weights",
    ),
    # preferences
    KeyHint(
        "ref_model ref_model_name_or_path reference_model",
        "reference",
        "not another model, but what training began with: off, copy or cached",
    ),
    KeyHint("precompute_ref_log_probs", "reference", "write reference=cached"),
    KeyHint("precompute_ref_batch_size", "reference", "write reference=cached; it asks `micro_batch` rows at once"),
    KeyHint(
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "reference",
        "the reference stays what training began with, and follows nothing",
    ),
    KeyHint("loss_type rl", "loss", "write loss=ipo, or a list of several", "reference"),
    KeyHint("loss_type", "loss", "forwardkl, reversekl, jensenshannon or another divergence", "teacher"),
    KeyHint("loss_type", "loss"),
    KeyHint("loss_weights", "loss.weight", "each term has its own: loss='[{kind: dpo, weight: 0.8}, sft]'"),
    KeyHint("rl_beta", "loss.beta", "", "reference"),
    KeyHint(
        "reward_weights reward_funcs",
        "",
        "reward functions are of GRPO, which is not here; a sum of losses (recipe "
        "preference) has a `weight` in each term",
    ),
    KeyHint(
        "label_smoothing label_smoothing_factor",
        "loss.smoothing",
        "the share of the target that is spread over the whole vocabulary",
        "loss.z_loss",
    ),
    KeyHint("label_smoothing", "loss.smoothing", "the share of pairs that are the wrong way round", "reference"),
    KeyHint(
        "label_smoothing_factor",
        "",
        "it spreads the target of a token over the vocabulary, and no loss of this "
        "recipe does; that of the recipe sft has loss.smoothing",
    ),
    KeyHint("f_divergence_type", "loss.divergence"),
    KeyHint("f_alpha_divergence_coef", "loss.divergence", "{kind: alpha_divergence, alpha: 0.5}"),
    KeyHint("ld_alpha", "tail"),
    KeyHint("discopop_tau", "loss.tau", "with loss=discopop"),
    KeyHint("desirable_weight", "loss.good", "with loss=kto"),
    KeyHint("undesirable_weight", "loss.bad", "with loss=kto"),
    KeyHint("simpo_gamma", "loss.gamma", "with loss=simpo"),
    KeyHint("cpo_alpha", "loss.nll", "with loss=cpo"),
    # scores
    KeyHint("num_labels", "loss.classes", "with loss=classification; or name the classes in data.classes"),
    KeyHint("num_labels", "", "classes are counted by the recipe reward: loss=classification loss.classes=N"),
    KeyHint(
        "id2label label2id", "data.classes", "the names in their order, with loss=classification data.kind=labelled"
    ),
    KeyHint("center_rewards_coefficient", "loss.center", "with loss=bradleyterry; TRL recommends 0.01"),
    KeyHint("step_separator", "data.separator", "with loss=process data.kind=stepped; a line break by default"),
    # teachers
    KeyHint("teacher_model_name_or_path teacher_model", "teacher.model"),
    KeyHint("teacher_model_revision", "teacher.model", "NAME@REVISION"),
    KeyHint("teacher_model_init_kwargs", "teacher", "its `weights` and `precision` say how it is kept"),
    KeyHint("lmbda", "on_policy.share", "the share of the rows of each step, where TRL draws for a whole batch"),
    KeyHint("seq_kd", "", "write the teacher's answers by the recipe generate first, and learn from those rows"),
    KeyHint(
        "temperature",
        "loss.temperature",
        "of what both models expect; answers of the student are drawn at "
        "on_policy.temperature, which is what GKDTrainer means, while DistillationTrainer means both",
        "teacher",
    ),
    KeyHint("top_p", "on_policy.top_p", "", "teacher"),
    KeyHint("top_k", "on_policy.top_k", "null for all tokens, where TRL says 0"),
    KeyHint("beta", "loss.beta", "with loss=jensenshannon; 0 is forwardkl and 1 reversekl", "teacher"),
    KeyHint("kd_ratio", "loss.truth", "1 - kd_ratio"),
    KeyHint(
        "alpha",
        "loss.truth",
        "the share of the rows' own tokens in the loss; loss.alpha is the skew of skewedkl, "
        "adapter.alpha the scale of a LoRA",
        "teacher",
    ),
)

PREFERENCE = "it is a loss of the recipe preference: tune run preference CONFIG loss={name}"
REWARD = "it is a loss of the recipe reward: tune run reward CONFIG loss={name}"
ONLINE = (
    "it rewards answers that are drawn in training, which is not here: there is preference (dpo, kto, orpo, simpo and \
others) for pairs and marks, and reward for reward models"
)
RECIPES = (
    ("dpo ipo kto orpo simpo cpo bco alphapo discopop robust hinge exo_pair sppo_hard apo_zero apo_down", PREFERENCE),
    ("rpo mpo", "it is a sum of losses of the recipe preference, such as tune run preference CONFIG loss=[dpo,sft]"),
    ("lora_dpo_single_device lora_dpo_distributed",
     "it is the recipe preference: tune run preference llama3_2/1b_dpo_lora"),
    ("full_dpo_distributed",
     "it is the recipe preference with adapter=full, which wants a lower optimizer.lr than an adapter: "
     "tune run preference llama3_2/1b_dpo_lora adapter=full optimizer.lr=1e-6"),
    ("grpo ppo rloo reinforce gspo dapo gmpo dr_grpo online_dpo nash_md xpo rlhf rlvr", ONLINE),
    ("ppo_full_finetune_single_device grpo_full_finetune_distributed", ONLINE),
    ("rm reward_model reward_modeling", REWARD.format(name="bradleyterry")),
    ("bradleyterry classification regression process", REWARD),
    ("prm", REWARD.format(name="process")),
    ("gkd kd distillation minillm knowledge_distillation_single_device knowledge_distillation_distributed",
     "it is the recipe distill: tune run distill CONFIG"),
    ("finetune train full full_finetune_single_device full_finetune_distributed",
     "it is the recipe sft with adapter=full, as in tune run sft llama3_2/1b_full"),
    ("lora dora lora_finetune_single_device lora_finetune_distributed",
     "it is the recipe sft with adapter=lora or dora, as in tune run sft llama3_2/1b_lora"),
    ("qlora qdora", "it is the recipe sft with adapter=lora weights=nf4, as in tune run sft llama3_2/1b_qlora"),
    ("eval eleuther_eval", "it is the recipe evaluate: tune run evaluate CONFIG"),
)  # fmt: skip


def find_hint(name: str, keys: Collection[Key]) -> KeyHint | None:
    """The line that tells what a key of another trainer is in a recipe with these keys; None for an unknown one."""
    fitting = (row for row in TABLE if row.key in ("", *keys) and row.where in (None, *keys))
    return next((row for row in fitting if name in row.names.split()), None)


def suggest_recipe(name: str) -> str | None:
    """What a recipe of another trainer is here; None for an unknown one."""
    told = (how for names, how in RECIPES if name.lower() in names.split())
    return next((how.format(name=name.lower()) for how in told), None)
