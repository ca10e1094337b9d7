"""The config of training recipes, and the checks that need no weights."""

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from tunekit import build, devices
from tunekit.adapters.config import DoRAConfig, LoRAConfig, NoAdapter
from tunekit.checkpoint import load_model
from tunekit.checkpoint.classification_head import require_language_model
from tunekit.checkpoint.hf_checkpoint import ConfigOverrides, HFCheckpoint
from tunekit.checkpoint.model_dir import ModelDirs
from tunekit.config.errors import FieldErrors
from tunekit.data.chat_template.chat_format import check_turn_end
from tunekit.data.dataloader.mixture import MixtureBase, SFTData, check_finite, is_streaming
from tunekit.data.datasets import DatasetConfig
from tunekit.data.tokenizer import Tokenizer
from tunekit.devices import DeviceChoice
from tunekit.distributed.parallel_dims import ParallelConfig
from tunekit.errors import FieldError, UserError
from tunekit.evaluation.answer_checks import AnswerChecks
from tunekit.generation.sampling import SamplingConfig
from tunekit.hub import download
from tunekit.loggers.metric_logger import Tracker
from tunekit.losses.embedding import EmbeddingLoss
from tunekit.losses.reward import RewardLoss
from tunekit.memory.config import MemoryConfig
from tunekit.models.compile import check_compile
from tunekit.models.precision import PrecisionConfig
from tunekit.models.spec import DecoderSpec
from tunekit.optim.config import (
    AdamW8bitConfig,
    AdamWConfig,
    ConstantLRConfig,
    CosineLRConfig,
    LinearLRConfig,
    MuonConfig,
    SGDConfig,
    WSDConfig,
)
from tunekit.publishing.publish import PushToHubConfig
from tunekit.quantization.config import Float8Config, FP4Config, NF4Config, NoQuantization
from tunekit.training.intervals import Interval, interval_error
from tunekit.training.profiler import ProfilerConfig, resolve_profiler
from tunekit.training.step_guard import StepGuardConfig

# Patterns of keys that may change when a run is resumed. Steps stay the same, except for rounding: another number of
# devices or another micro-batch size adds the same gradients in another order. docs/checkpoints.md lists the effects.
LIVE_KEYS = frozenset(
    {
        "memory",
        "micro_batch_size",
        "on_policy.batch_size",
        "generation_eval.batch_size",
        "max_num_seqs",
        "data*.num_proc",  # also of the datasets of a mixture
        "eval_data*.num_proc",
        "eval_every",
        "num_completions_to_print",
        "*.num_completions_to_print",
        "num_episodes_to_save",
        "output_dir",
        "log_every",
        "report_to",
        "save_total_limit",
        "load_best_model_at_end",
        "save_every",
        "async_save",
        "push_to_hub",
        "data_checks",
        "parallel",
        "step_guard",
        "profiler",
        "forgetting",
        "deterministic",
        "cuda_graph",
    }
)

COUNTS = (  # keys that must be positive
    "global_batch_size",
    "micro_batch_size",
    "epochs",
    "save_total_limit",
    "log_every",
)
OPTIONAL_COUNTS = ("max_steps", "early_stopping_patience")

ANSWER_METRICS = {"exact_match": "data", "regex_match": "regex", "json_schema_match": "json_schema"}  # and their keys


def invalid_path(path: str) -> str | None:
    """Why no file can have this path, or why safetensors cannot write to it; None for a valid path."""
    try:
        names = path.encode("utf-8").split(b"/")
    except UnicodeEncodeError:
        return f"must be UTF-8 text, got {path!r}"
    if "\0" in path:
        return "must not contain a null character"
    longest = max(map(len, names))
    return f"a name in a path has at most 255 bytes, got {longest}" if longest > 255 else None


@dataclass(frozen=True)
class ForgettingConfig:
    """Held-out rows whose loss may not rise much. It is measured before the first step and during training."""

    data: SFTData  # Held-out rows of a skill that the model has before training
    # Steps between two evaluations; a value below 1 is a fraction of all steps; `epoch`. One more after the last step
    eval_every: Interval = 100
    max_loss_increase: float = 0.1  # Allowed increase over the loss before training, in nats per token
    # Action on a larger increase; `stop`: save and end the run
    on_exceed: Literal["stop", "warn"] = "stop"

    def __post_init__(self) -> None:
        if error := interval_error("eval_every", self.eval_every, is_stream=False):
            raise error
        if not self.max_loss_increase > 0:
            raise FieldError("max_loss_increase", f"must be > 0, got {self.max_loss_increase}")
        if is_streaming(self.data):
            raise FieldError("data", "cannot be streamed. Set streaming=false; max_samples limits the rows.")

    def check(self, spec: DecoderSpec, tokenizer: Tokenizer) -> None:
        """Raise UserError if the rows do not exist or the model has no language model head. Reads no rows."""
        if spec.score is not None:
            raise UserError("forgetting: needs a language model, and this model has a score head. Remove forgetting.")
        self.data.check_source()
        self.data.prepare_tokenizer(tokenizer)


@dataclass(frozen=True)
class GenerationEvalConfig:
    """Answers that the model in training generates at each evaluation, kept in `completions.jsonl`.

    The metrics `exact_match`, `regex_match` and `json_schema_match` are fractions of the answers.
    """

    kind: ClassVar[str] = "generation_eval"
    prompts: tuple[str, ...] = ()  # User messages to answer
    data: SFTData | None = None  # Held-out rows whose last answers are generated; `max_samples` limits them
    sampling: SamplingConfig = SamplingConfig()  # How answers are generated
    batch_size: int = 16  # Answers per forward pass
    # Regular expression that an answer must contain; the groups of its last match must be those in the expected answer
    regex: str | None = None
    json_schema: str | None = None  # JSON file; answers must be JSON that this schema allows. Needs package jsonschema
    num_completions_to_print: int = 3  # Number of answers to print

    def __post_init__(self) -> None:
        if not self.prompts and self.data is None:
            raise FieldError("prompts", "nothing to answer. Set prompts or data.")
        if self.batch_size < 1:
            raise FieldError("batch_size", f"must be >= 1, got {self.batch_size}")
        if self.data is not None and is_streaming(self.data):
            raise FieldError("data", "cannot be streamed. Set streaming=false; max_samples limits the rows.")
        assert self.checks is not None  # its own checks

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics; empty if answers are only shown."""
        return [name for name, key in ANSWER_METRICS.items() if getattr(self, key) is not None]

    @cached_property
    def checks(self) -> AnswerChecks:
        return AnswerChecks(self.regex, self.json_schema, "generation_eval.")

    def check(self, spec: DecoderSpec, tokenizer: Tokenizer) -> None:
        """Raise UserError if the model cannot answer, or the rows or the schema do not exist. Reads no rows."""
        if spec.score is not None:
            raise UserError("generation_eval: needs a language model, and this model has a score head. Remove it.")
        assert (self.checks.validator is None) == (self.json_schema is None)  # raises UserError
        if self.prompts:
            tokenizer.template()  # raises UserError if there is none
        if self.data is not None:
            self.data.check_source()
            self.data.prepare_tokenizer(tokenizer)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The keys that all training recipes share."""

    model: str  # Checkpoint directory, Hub name, or tunekit/nano
    # Other values for keys of the model's config.json, such as `{max_position_embeddings: 131072, rope_scaling:
    # {rope_type: yarn, factor: 4}}`; written into the config.json of the result
    config_overrides: ConfigOverrides = field(default_factory=dict)
    data: DatasetConfig | MixtureBase  # Training rows; each recipe lists the kinds that it reads
    output_dir: str  # Run directory: config, metrics, training states and the final checkpoint
    eval_data: DatasetConfig | MixtureBase | None = None  # Held-out rows for evaluation during training
    # What to do when the data checks find unusable data
    data_checks: Literal["error", "warn"] = "error"
    # How frozen weights are stored; `nf4` with an adapter is QLoRA
    quantization: NoQuantization | NF4Config | FP4Config | Float8Config = NoQuantization()
    adapter: NoAdapter | LoRAConfig | DoRAConfig = (
        NoAdapter()
    )  # Trained weights: all of them (`none`), or LoRA or DoRA adapters
    optimizer: AdamWConfig | AdamW8bitConfig | MuonConfig | SGDConfig = AdamWConfig()  # Optimizer
    # Learning rate schedule
    lr_scheduler: CosineLRConfig | LinearLRConfig | ConstantLRConfig | WSDConfig = CosineLRConfig()
    precision: PrecisionConfig = PrecisionConfig()  # dtypes of weights and computation
    memory: MemoryConfig = MemoryConfig()  # Activation checkpointing and offloading, optimizer_in_bwd
    parallel: ParallelConfig = ParallelConfig()  # How several devices share the model and the data
    step_guard: StepGuardConfig = StepGuardConfig()  # Detect NaN, Inf and loss spikes
    forgetting: ForgettingConfig | None = None  # Stop when the loss on a held-out task rises (catastrophic forgetting)
    # Prompts that the model in training answers at each evaluation, and metrics of the answers
    generation_eval: GenerationEvalConfig | None = None
    profiler: ProfilerConfig | bool = False  # Profile some steps with torch.profiler; `true` uses the defaults
    push_to_hub: PushToHubConfig | None = None  # Upload the result to the Hugging Face Hub
    # NEFTune (arXiv:2310.05914): scale of uniform noise on the input embeddings in training, such as 5; null: no noise
    neftune_noise_alpha: float | None = None
    init: Literal["pretrained", "random"] = "pretrained"  # `random`: train from scratch what config.json describes
    tokenizer: str | None = None  # Directory or Hub name of another tokenizer; null: the checkpoint's
    # Tokens to add to the tokenizer and the model; their embeddings start as the mean of all others, or, with
    # `{token: text}`, as the mean of those of a text. With an adapter, they are trained on their own
    new_tokens: tuple[str, ...] | dict[str, str] = ()
    # As `new_tokens`, for tokens such as `<|im_end|>` that are not part of the text of an answer
    new_special_tokens: tuple[str, ...] | dict[str, str] = ()
    device: DeviceChoice = "auto"  # `auto`: the first of cuda, xpu and mps that torch finds, else cpu
    global_batch_size: int = 16  # Rows per optimizer step, over all devices
    micro_batch_size: int = 1  # Rows per forward pass on one device
    epochs: int = 1  # Passes over the training rows
    max_steps: int | None = None  # Optimizer steps; overrides `epochs`
    max_grad_norm: float = 1.0  # Maximum gradient norm; 0 disables clipping
    # Steps between two training states, from which a run resumes; a value below 1 is a fraction of all steps; `epoch`
    save_every: Interval = 500
    # Write training states in the background, from a copy in host memory; `auto`: on GPUs
    async_save: bool | Literal["auto"] = "auto"
    save_total_limit: int = 1  # Number of training states to keep
    eval_every: Interval = 500  # Steps between two evaluations; a value below 1 is a fraction of all steps; `epoch`
    early_stopping_patience: int | None = None  # Evaluations without a better metric before the run stops
    # The result has the weights of the best evaluation, not the last ones; null: with early_stopping_patience
    load_best_model_at_end: bool | None = None
    metric_for_best_model: str = "loss"  # Metric of the evaluation, such as `loss` or `rewards/accuracies`
    greater_is_better: bool | None = None  # Whether a higher metric is better; null: unless its name ends with `loss`
    log_every: int = 1  # Steps between two metric lines; the device is only read then
    report_to: tuple[Tracker, ...] = ()  # Experiment trackers that receive the metrics, such as `[wandb]`
    compile: bool = False  # Compile each layer with torch.compile
    # Launch the kernels of the layers as CUDA graphs, which is faster if the model or the micro-batch is small. For
    # dense models on one GPU, in bf16. `auto`: where that is possible and the work of a micro-batch is small
    cuda_graph: bool | Literal["auto"] = "auto"
    seed: int = 0  # Seed of data order, dropout and initialization
    # Bit-identical results on the same device; slower on GPUs. Operations without a deterministic version are errors
    deterministic: bool = False

    def __post_init__(self) -> None:
        self.check_values()
        self.check_best_model()
        check_finite(self.data, self.max_steps, self.eval_data)
        self.check_trainable()
        self.check_memory()
        self.step_guard.check_optimizer(self.memory.optimizer_in_bwd)
        if (profiler := resolve_profiler(self.profiler)) is not None:
            profiler.check_num_steps(self.max_steps)

    def check_values(self) -> None:
        """Raise FieldErrors for all values that are out of range."""
        errors = [
            FieldError(name, f"must be >= 1{' or null' if name in OPTIONAL_COUNTS else ''}, got {value}")
            for name in (*COUNTS, *OPTIONAL_COUNTS)
            if (value := getattr(self, name)) is not None and value < 1
        ]
        is_stream = is_streaming(self.data)
        intervals: dict[str, Interval] = {"save_every": self.save_every, "eval_every": self.eval_every}
        if self.forgetting is not None:
            intervals["forgetting.eval_every"] = self.forgetting.eval_every
        errors += filter(None, (interval_error(key, every, is_stream) for key, every in intervals.items()))
        if self.neftune_noise_alpha is not None and not 0 < self.neftune_noise_alpha < math.inf:
            problem = f"must be > 0, got {self.neftune_noise_alpha}. Set null for no noise"
            errors.append(FieldError("neftune_noise_alpha", problem))
        if self.max_grad_norm < 0:
            errors.append(FieldError("max_grad_norm", f"must be >= 0, got {self.max_grad_norm}"))
        if problem := invalid_path(self.output_dir):
            errors.append(FieldError("output_dir", problem))
        if errors:
            raise FieldErrors(errors)

    def check_best_model(self) -> None:
        """Raise FieldError for keys of the best model without evaluations, or without effect."""
        metrics = [] if self.generation_eval is None else self.generation_eval.metrics
        has_metrics, best = self.eval_data is not None or bool(metrics), self.metric_for_best_model
        if best in ANSWER_METRICS and best not in metrics:
            raise FieldError("metric_for_best_model", f"{best} requires generation_eval.{ANSWER_METRICS[best]}")
        for name in ("early_stopping_patience", "load_best_model_at_end"):
            if getattr(self, name) and self.has_evaluation and not has_metrics:
                raise FieldError("generation_eval", "has no metric. Set generation_eval.data or generation_eval.regex.")
            if getattr(self, name) and not self.has_evaluation:
                raise FieldError(name, "requires eval_data or generation_eval")
            if getattr(self, name) and self.eval_data is None and best == "loss":
                raise FieldError("metric_for_best_model", "loss requires eval_data. Set exact_match or regex_match.")
        is_default = best == type(self).metric_for_best_model
        if not is_default and not (self.early_stopping_patience or self.load_best_model_at_end):
            raise FieldError("metric_for_best_model", "requires load_best_model_at_end or early_stopping_patience")

    @property
    def has_evaluation(self) -> bool:
        """Whether the model is evaluated every `eval_every` steps."""
        return self.eval_data is not None or self.generation_eval is not None

    def check_memory(self) -> None:
        """Raise FieldError if an option of `memory` is not compatible with another key."""
        if self.compile and self.memory.activation_checkpointing == "selective":
            problem = (
                "not compatible with torch.compile, which decides itself what to recompute. Set it to none or full."
            )
            raise FieldError("memory.activation_checkpointing", problem)
        self.memory.check_clipping(self.max_grad_norm)
        if self.precision.compute_dtype == "fp16":
            self.memory.check_loss_scaling()
        if self.cuda_graph is True and (fixes := self.list_cuda_graph_conflicts()):
            problem = f"not compatible with other keys. Set {' '.join(fixes)}, or cuda_graph=auto."
            raise FieldError("cuda_graph", problem)

    def list_cuda_graph_conflicts(self) -> list[str]:
        """Overrides without which passes cannot be CUDA graphs."""
        fixes = {
            "compile=false": self.compile,
            "memory.activation_checkpointing=none": self.memory.activation_checkpointing != "none",
            "memory.activation_offloading=false": self.memory.activation_offloading,
            "memory.optimizer_in_bwd=false": self.memory.optimizer_in_bwd,
            "precision.compute_dtype=bf16": self.precision.compute_dtype not in ("auto", "bf16"),
            "adapter.dropout=0": isinstance(self.adapter, LoRAConfig) and self.adapter.dropout > 0,
            "neftune_noise_alpha=null": self.neftune_noise_alpha is not None,
        }
        return [fix for fix, is_needed in fixes.items() if is_needed]

    def check_trainable(self) -> None:
        """Raise FieldError if the trained weights cannot be trained or saved."""
        if not self.quantization.trainable and isinstance(self.adapter, NoAdapter):
            raise FieldError("quantization", "quantized weights cannot be trained. Set adapter=lora or adapter=dora.")
        if self.init == "random" and not isinstance(self.adapter, NoAdapter):
            raise FieldError("init", "random weights under an adapter are not saved. Set adapter=none.")

    def continue_adapter(self) -> Self:
        """Config that continues the training of the adapter `model`; this config if `model` is no adapter directory.

        Sets `model` to its base and `adapter.adapter_path` to its directory, which may be that of a finished run. Keys
        of `adapter` that have their default values are set to those of this adapter.
        """
        if (
            isinstance(self.adapter, NoAdapter)
            or self.adapter.adapter_path is not None
            or not Path(self.model).is_dir()
        ):
            return self
        base, adapter = build.resolve_checkpoint(self.model, download.SMALL, self.model_dirs)
        if adapter.adapter_path is None:
            return self
        cls, names = type(self.adapter), [field.name for field in fields(adapter)]
        changed = {name for name in names if getattr(self.adapter, name) != getattr(cls(), name)}
        values = {name: getattr(self.adapter if name in changed else adapter, name) for name in names}
        continued = replace(self, model=base.name, adapter=cls(**values))
        continued.model_dirs.dirs |= self.model_dirs.dirs
        return continued

    @cached_property
    def model_dirs(self) -> ModelDirs:
        """The open directories of `model`, `tokenizer` and `adapter.adapter_path`, whose files are read once."""
        return ModelDirs()

    def with_head(self, checkpoint: HFCheckpoint) -> HFCheckpoint:
        """The checkpoint with the head that is trained; here the language model head, which it must have."""
        require_language_model(checkpoint)
        return checkpoint

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer of the data. Reads no weights."""
        return build.open_tokenizer(build.read_checkpoint(self))


def check_training(cfg: TrainConfig) -> None:
    """Raise UserError for what can be found without weights: device, checkpoint, adapter, parallelism, data files."""
    if cfg.device in ("auto", "cpu"):  # a config for a GPU can be checked on a machine without one
        device = devices.select_device(cfg.device)
        cfg.memory.check(device)
        if cfg.compile:
            check_compile(device)
        cfg.precision.check(device)
        cfg.parallel.check(device.type, 1)
    checkpoint = read_checkpoint_and_sources(cfg)
    model = build.build_meta_model(checkpoint, cfg.quantization, cfg.adapter)
    list(cfg.optimizer.apply_lr_pattern(cfg.adapter.param_groups(model), model))
    build.check_parallelizable(checkpoint, cfg.quantization, cfg.adapter, cfg.parallel)
    if cfg.init == "pretrained" and download.cached_commit(checkpoint.path) is None:  # not downloaded in full yet
        load_model.check_tensors(checkpoint, model.shapes)
    tokenizer = build.open_tokenizer(checkpoint)
    for dataset in filter(None, (cfg.data, cfg.eval_data)):
        dataset.prepare_tokenizer(tokenizer)
    if generates_answers(cfg) and MixtureBase.from_config(cfg.data).chat_template and cfg.data_checks == "error":
        check_turn_end(tokenizer)
    if cfg.forgetting is not None:
        cfg.forgetting.check(checkpoint.spec, tokenizer)
    if cfg.generation_eval is not None:
        cfg.generation_eval.check(checkpoint.spec, tokenizer)


@runtime_checkable
class HasLoss(Protocol):
    """A config with a loss. Evaluation has none."""

    @property
    def loss(self) -> Any: ...


def generates_answers(cfg: TrainConfig) -> bool:
    """Whether the result generates text: it is neither a reward model nor an embedding model."""
    return not isinstance(cfg, HasLoss) or not isinstance(cfg.loss, RewardLoss | EmbeddingLoss)


def read_checkpoint_and_sources(cfg: TrainConfig) -> HFCheckpoint:
    """The checkpoint. Raises UserError with a line for each model or data source that does not exist."""
    problems, checkpoint = [], None
    try:
        checkpoint = build.read_checkpoint(cfg)
    except UserError as error:
        problems.append(str(error))
    for dataset in filter(None, (cfg.data, cfg.eval_data)):
        try:
            dataset.check_source()
        except UserError as error:
            problems.append(str(error))
    if problems or checkpoint is None:
        raise UserError("\n".join(dict.fromkeys(problems)))  # an unknown chat template is reported by both
    return checkpoint
