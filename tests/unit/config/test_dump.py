import string

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunekit.config.build import ENVIRONMENT_VARIABLE
from tunekit.config.dump import diff_configs, dump_yaml, to_plain_config
from tunekit.config.load import load_config, mapping

TEXT = (
    st.text()
    | st.text(st.sampled_from("\\${}[]:#-'\"\n\t *&!|>%@,~\x85\u2028\u2029"))
    | st.sampled_from(["on", "no", "null", "~", "2e-4", "1_0", "0x1", "012", "1:30", "2024-01-01"])
    | st.sampled_from(["None", "<<", "=", "${a}", "???", ".nan", "true", "${oc.env:HOME}"])
)
PATHS = TEXT.filter(lambda text: not text.startswith("~") and not ENVIRONMENT_VARIABLE.search(text))  # as after loading
FLOAT = st.floats(allow_nan=False)
MAX_INT64 = 2**63 - 1  # integers beyond 64 bits are refused
INTEGERS = st.integers(-MAX_INT64, MAX_INT64)


def values(tree):
    """Any value of the test recipe."""
    rows = st.builds(tree.Rows, source=PATHS, length=INTEGERS, pack=st.booleans())
    alpha, targets = st.floats(0), TEXT | st.lists(TEXT).map(tuple)
    lora = {"rank": st.integers(1, MAX_INT64), "alpha": alpha, "targets": targets}
    adapters = st.builds(tree.LoRA, **lora) | st.builds(tree.DoRA, **lora, magnitude=st.booleans())
    sgd = st.builds(tree.SGD, lr=FLOAT, momentum=st.none() | FLOAT)
    logger = st.just(tree.TensorBoard()) | st.builds(tree.WandB, project=TEXT)
    return st.builds(
        tree.SFT,
        model=PATHS,
        data=rows,
        out=TEXT,
        adapter=st.just(tree.Full()) | adapters,
        optimizer=st.builds(tree.AdamW, lr=FLOAT, betas=st.tuples(FLOAT, FLOAT)) | sgd,
        validation=st.none() | rows,
        other=st.none() | adapters,
        log=st.builds(tree.Log, every=INTEGERS, to=st.lists(logger, max_size=3).map(tuple)),
        loss=st.builds(tree.Loss, weights=st.lists(FLOAT, max_size=3).map(tuple)),
        batch=INTEGERS,
        clip=st.none() | FLOAT,
        dtype=st.sampled_from(["bf16", "fp32"]),
        compile=st.booleans(),
        size=INTEGERS | TEXT,
        name=st.none() | TEXT,
        words=st.dictionaries(TEXT, TEXT, max_size=3),
        rates=st.dictionaries(st.text(string.ascii_letters, min_size=1), sgd, max_size=2),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_dumped_config_is_loaded_unchanged(tree, data):
    value = data.draw(values(tree))
    text = dump_yaml(value, "sft")
    assert load_config(tree.SFT, text) == value
    assert mapping(text) == to_plain_config(value, "sft")
    assert diff_configs(mapping(text), to_plain_config(value, "sft")) == []
    if "${" not in text:
        assert yaml.safe_load(text) == to_plain_config(value, "sft")  # YAML 1.1 parsers read the same values


def test_fields_are_dumped_in_order(sft):
    text = dump_yaml(sft("adapter: {kind: dora, rank: 3}\nlog: {to: [wandb]}\nvalidation: {source: ä}"), "sft")
    assert text.startswith(
        "recipe: sft\nmodel: m\ndata:\n  source: s\n  length: 2048\n  pack: false\n"
        "out: o\nadapter:\n  kind: dora\n  rank: 3\n"
    )
    assert "  lr: 0.0003\n  betas: [0.9, 0.999]\nvalidation:\n  source: ä\n" in text
    assert "  to:\n  - kind: wandb\n    project: tunekit\n" in text
    assert "other: null\n" in text


def test_diff_lists_keys_with_both_values(sft):
    old, new = (
        to_plain_config(sft("adapter: lora")),
        to_plain_config(sft("adapter: full\nbatch: 3\nlog: {to: [wandb]}", "optimizer.betas.1=0.5")),
    )
    assert diff_configs(old, new) == [
        ("adapter.kind", "lora", "full"),
        ("optimizer.betas.1", 0.999, 0.5),
        ("log.to.0.kind", None, "wandb"),
        ("batch", 64, 3),
    ]
    old, new = (
        to_plain_config(sft(f"adapter: {{kind: {kind}, rank: {rank}}}")) for kind, rank in (("lora", 8), ("dora", 4))
    )
    assert diff_configs(old, new) == [("adapter.kind", "lora", "dora"), ("adapter.rank", 8, 4)]
    assert diff_configs({"a": True, "b": float("nan"), "c": 1}, {"a": 1, "b": float("nan"), "c": 1.0}) == [
        ("a", True, 1)
    ]
