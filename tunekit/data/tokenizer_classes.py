"""Tokenizer classes of transformers 5, which read tokenizer.json as it is or rebuild it around its vocabulary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]
Settings = Mapping[str, Any]  # values of tokenizer_config.json, with the defaults of the class

BYTE_LEVEL_OPTIONS = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
SPACE = "\u2581"


def byte_level(vocabulary: Vocabulary, merges: Merges, **options: bool) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocabulary, merges, **BYTE_LEVEL_OPTIONS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build_gpt2(vocabulary: Vocabulary, merges: Merges, settings: Settings) -> Tokenizer:
    return byte_level(vocabulary, merges, add_prefix_space=bool(settings.get("add_prefix_space")))


def build_gpt_neox(vocabulary: Vocabulary, merges: Merges, settings: Settings) -> Tokenizer:
    tokenizer = build_gpt2(vocabulary, merges, settings)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def build_cohere(vocabulary: Vocabulary, merges: Merges, settings: Settings) -> Tokenizer:
    tokenizer = build_gpt_neox(vocabulary, merges, settings)
    steps = [pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def build_qwen(pattern: str) -> Callable[[Vocabulary, Merges, Settings], Tokenizer]:
    def build(vocabulary: Vocabulary, merges: Merges, settings: Settings) -> Tokenizer:
        adds_space = bool(settings.get("add_prefix_space"))
        tokenizer = byte_level(vocabulary, merges, add_prefix_space=adds_space, use_regex=False)
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
        return tokenizer

    return build


def build_gemma(vocabulary: Vocabulary, merges: Merges, settings: Settings) -> Tokenizer:
    unknown = str(settings["unk_token"])
    tokenizer = Tokenizer(BPE(vocabulary, merges, fuse_unk=True, unk_token=unknown, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def with_metaspace(tokenizer: Tokenizer, scheme: str, strips_space: bool) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps)
    return tokenizer


def prefix_scheme(settings: Settings) -> str:
    """Where a space is inserted: of texts, or with `legacy` also of the texts after added tokens."""
    adds_space = settings.get("add_prefix_space")
    if adds_space is not None and not adds_space:
        return "never"
    return "always" if settings.get("legacy") else "first"


def build_llama(vocabulary: Vocabulary, merges: Merges, settings: Settings) -> Tokenizer:
    scheme = prefix_scheme(settings)
    return with_metaspace(
        Tokenizer(BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True)), scheme, scheme != "never"
    )


def build_code_llama(vocabulary: Vocabulary, merges: Merges, settings: Settings) -> Tokenizer:
    unknown = str(settings["unk_token"])
    model = BPE(vocabulary, merges, fuse_unk=True, unk_token=unknown, byte_fallback=True)
    return with_metaspace(Tokenizer(model), prefix_scheme({**settings, "legacy": False}), True)


@dataclass(frozen=True)
class TokenizerClass:
    """A class of transformers. `build` makes its tokenizer from a BPE vocabulary; None: tokenizer.json as it is.

    The post-processor is that of tokenizer.json, unless `adds_bos` is set.
    """

    build: Callable[[Vocabulary, Merges, Settings], Tokenizer] | None = None
    special_tokens: Mapping[str, str | None] = field(default_factory=dict)  # defaults of tokenizer_config.json
    infill_tokens: Mapping[str, str] = field(default_factory=dict)  # special tokens besides the standard ones
    adds_bos: bool | None = None
    resets_flags: bool = False  # whether all special tokens lose flags such as `rstrip`
    marks_special: bool = False  # whether named tokens become special, if tokenizer.json has them as others


TOKENIZER_JSON = TokenizerClass()
ENDOFTEXT = "<|endoftext|>"
GPT2_TOKENS = {"unk_token": ENDOFTEXT, "bos_token": ENDOFTEXT, "eos_token": ENDOFTEXT, "pad_token": None}
QWEN_TOKENS = {"unk_token": ENDOFTEXT, "bos_token": None, "eos_token": ENDOFTEXT, "pad_token": ENDOFTEXT}
LLAMA_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
GEMMA_TOKENS = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
GEMMA_TOKENS |= {"mask_token": "<mask>"}
COHERE_TOKENS = {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"}
COHERE_TOKENS |= {"pad_token": "<PAD>", "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>"}
INFILL_TOKENS = {"prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>", "eot_token": "▁<EOT>"}
INFILL_TOKENS |= {"fill_token": "<FILL_ME>"}
CLASSES = {
    "CodeLlamaTokenizer": TokenizerClass(build_code_llama, LLAMA_TOKENS, INFILL_TOKENS, adds_bos=True),
    "CohereTokenizer": TokenizerClass(build_cohere, COHERE_TOKENS, marks_special=True),
    "GPT2Tokenizer": TokenizerClass(build_gpt2, GPT2_TOKENS),
    "GPTNeoXTokenizer": TokenizerClass(build_gpt_neox, {**GPT2_TOKENS, "pad_token": "<|padding|>"}, adds_bos=False),
    "GemmaTokenizer": TokenizerClass(build_gemma, GEMMA_TOKENS),
    "LlamaTokenizer": TokenizerClass(build_llama, LLAMA_TOKENS),
    "Qwen2Tokenizer": TokenizerClass(build_qwen(QWEN2), QWEN_TOKENS, resets_flags=True),
    "Qwen3_5Tokenizer": TokenizerClass(build_qwen(QWEN3_5), QWEN_TOKENS),
}
# Classes that build other tokenizers than tokenizer.json describes, or are written in Python.
UNSUPPORTED = {f"{name}Tokenizer" for name in (
    "Albert", "Bart", "Barthez", "Bartpho", "Bert", "BertGeneration", "BertJapanese", "Bertweet", "BigBird", "BioGpt",
    "Blenderbot", "BlenderbotSmall", "ByT5", "Camembert", "Canine", "CLIP", "Clvp", "CodeGen", "Cpm", "CpmAnt",
    "CTRL", "Deberta", "DebertaV2", "Dia", "DistilBert", "DPRQuestionEncoder", "Electra", "Esm", "Esmc", "Flaubert",
    "FNet", "FSMT", "Funnel", "GPTNeoXJapanese", "GPTSw3", "Herbert", "Lasr", "LayoutLM", "LayoutLMv2", "LayoutLMv3",
    "LayoutXLM", "LED", "Longformer", "Luke", "Lxmert", "M2M100", "Marian", "MarkupLM", "MBart", "MBart50", "Mgpstr",
    "MLuke", "MobileBert", "MPNet", "MT5", "Mvp", "MyT5", "Nllb", "Nougat", "OpenAIGPT", "Parakeet", "Pegasus",
    "Perceiver", "Phobert", "PLBart", "ProphetNet", "Rag", "Reformer", "RemBert", "Roberta", "RoCBert", "RoFormer",
    "SeamlessM4T", "Siglip", "Siglip2", "Splinter", "T5", "Tapas", "Udop", "VideoPrism", "Vits", "Wav2Vec2CTC",
    "Wav2Vec2PhonemeCTC", "Whisper", "XGLM", "XLM", "XLMRoberta", "XLNet",
)}  # fmt: skip
# Class of a model type. Where tokenizer_config.json names none, it is used; where it names another, only if it is one
# of FORCED, or reads tokenizer.json as it is.
AS_FILE = "TokenizersBackend"
MODEL_CLASSES = {
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_next", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
    "olmoe": "GPTNeoXTokenizer",
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4_moe", "olmo2", "olmo3", "phi3"), AS_FILE),
    **dict.fromkeys(("granite", "granitemoe", "granitemoehybrid", "granitemoeshared"), AS_FILE),
    **dict.fromkeys(("ministral", "ministral3", "mistral", "mistral3", "mixtral"), AS_FILE),
}
FORCED = {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "ernie4_5", "ernie4_5_moe", "phi3"}


def base_name(value: object) -> str | None:
    """Name of a class without the ending of earlier versions of transformers; None if there is none."""
    if not isinstance(value, str) or not value:
        return None
    name = value.removesuffix("Fast")
    is_generic = name in ("PreTrainedTokenizer", "PythonBackend", "BloomTokenizer")
    return AS_FILE if is_generic else name


def find_class_name(config: Settings, model_config: Settings, is_byte_level: bool) -> str:
    """Name of the class that AutoTokenizer uses.

    `config` and `model_config`: tokenizer_config.json and config.json. `is_byte_level`: whether tokenizer.json has
    byte-level steps, which the classes of Llama lack.
    """
    model_type = model_config.get("model_type")
    registered = MODEL_CLASSES.get(model_type) if isinstance(model_type, str) else None
    named = base_name(config.get("tokenizer_class")) or base_name(model_config.get("tokenizer_class"))
    auto_map = config.get("auto_map")
    has_code = isinstance(auto_map, list) or (isinstance(auto_map, dict) and "AutoTokenizer" in auto_map)
    if named is None:
        return registered or AS_FILE
    if has_code:
        return named
    if named == "LlamaTokenizer" and is_byte_level and model_type not in FORCED:
        return AS_FILE
    if registered is None or registered == named:
        return named
    if registered == AS_FILE:
        return AS_FILE
    return registered if model_type in FORCED else named
