"""Answers of the generate recipe do not depend on the batch, are reproducible, and are printed or written to a file."""

import json
import os

import pytest

from tunekit import build

PROMPTS = ["What is 1 plus 1?", "What is 4 plus 16?", "Why?", "What is a day? " * 9]


@pytest.fixture
def run_generate(workspace, memorized_run):
    """Function that generates answers with some options, in the order of the prompts."""
    lines = [
        f"model: {memorized_run}",
        f"prompts: {json.dumps(PROMPTS)}",
        "device: cpu",
        "precision: {compute_dtype: fp32}",
    ]
    lines += ["sampling: {max_new_tokens: 12}", "recipe: generate"]
    (workspace.folder / "generate.yaml").write_text("\n".join(lines))

    def call(*args):
        result = workspace.run_tune("run", "generate", "generate.yaml", "output_path=new/answers.jsonl", *args)
        assert result.code == 0, result.err
        assert result.err == "", "no progress bar without a terminal"
        rows = [json.loads(line) for line in (workspace.folder / "new/answers.jsonl").read_text().splitlines()]
        assert result.out == f"{len(rows)} answers in new/answers.jsonl\n"
        return rows

    return call


def test_memorized_answers_are_generated(run_generate):
    rows = run_generate()
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["answer"] for row in rows[:2]] == ["It is 2!", "It is 20!"]


def test_greedy_answers_do_not_depend_on_the_batch(run_generate):
    rows = run_generate()
    for batch in (1, 2, 3):
        assert run_generate(f"max_num_seqs={batch}") == rows
    (last,) = run_generate(f"prompts={json.dumps(PROMPTS[3:])}")
    assert last == rows[3]


def test_sampling_is_reproducible(run_generate):
    args = ("sampling={temperature: 1.5, max_new_tokens: 12, seed: 5}", "max_num_seqs=4")
    rows = run_generate(*args)
    assert run_generate(*args) == rows
    assert run_generate(*args, "max_num_seqs=1") == rows
    assert run_generate(*args, "sampling.seed=6") != rows
    repeated = run_generate(*args, f"prompts={json.dumps(PROMPTS[2:3] * 2)}")
    assert repeated[0]["answer"] != repeated[1]["answer"], "the same question twice is two draws"


@pytest.mark.parametrize("key", ["output_path", "episodes_path"])
@pytest.mark.parametrize("path", [".", "", "answers.fifo", "questions.jsonl/answers.jsonl"])
def test_unwritable_paths_are_found_before_anything_is_generated(key, path, run_generate, workspace):
    os.mkfifo(workspace.folder / "answers.fifo")
    (workspace.folder / "questions.jsonl").write_text('{"prompt": "a"}')
    args = ("source=questions.jsonl", "rewards=[{kind: length, max_tokens: 3}]", f"{key}={json.dumps(path)}")
    result = workspace.run_tune("run", "generate", "generate.yaml", *args)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert (workspace.folder / "answers.fifo").is_fifo()


def test_prompts_are_read_from_a_file(run_generate, workspace):
    messages = [{"role": "user", "content": PROMPTS[0]}]
    rows = [
        {"messages": [*messages, {"role": "assistant", "content": "No."}]},
        {"messages": messages},
        {"prompt": PROMPTS[1]},
    ]
    (workspace.folder / "source.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = run_generate("prompts=[]", "source=source.jsonl")
    assert [row["answer"] for row in answers] == ["It is 2!", "It is 2!", "It is 20!"]
    assert [row["prompt"] for row in answers] == [messages, messages, PROMPTS[1]], "without the answer of the row"


def test_answers_are_printed_without_an_output_path(workspace, run_generate):
    run_generate()
    result = workspace.run_tune("run", "generate", "generate.yaml", f"prompts={json.dumps(PROMPTS[:1])}")
    assert result.out == "> What is 1 plus 1?\nIt is 2!\n\n"


def test_raw_prompts_are_continued(workspace, run_generate):
    """Without the chat template, the text differs."""
    template = run_generate("prompts=[It is]")
    assert run_generate("prompts=[It is]", "apply_chat_template=false") != template


def test_several_answers_to_each_prompt(run_generate):
    """Answer k to prompt i of n is row i * n + k of the random numbers, whatever the batch."""
    args = ("sampling={temperature: 1.5, max_new_tokens: 12, seed: 5}", f"prompts={json.dumps(PROMPTS[2:])}")
    rows = run_generate(*args, "num_return_sequences=3", "max_num_seqs=2")
    assert [row["prompt"] for row in rows] == [prompt for prompt in PROMPTS[2:] for _ in range(3)]
    repeated = [prompt for prompt in PROMPTS[2:] for _ in range(3)]
    assert run_generate(*args, f"prompts={json.dumps(repeated)}") == rows
    assert len({row["answer"] for row in rows[:3]}) > 1


@pytest.mark.parametrize(("args", "key"), [
    (["num_return_sequences=2"], "num_return_sequences"), (["num_return_sequences=0"], "num_return_sequences"),
    (["max_model_len=-5"], "max_model_len: must be >= 1, got -5"),
    (["sampling.stop_strings=['']"], "sampling.stop_strings"), (["config_overrides.no_key=1"], "config_overrides"),
])  # fmt: skip
def test_unusable_options_are_one_line_errors(workspace, run_generate, args, key):
    run_generate()  # writes the config
    result = workspace.run_tune("run", "generate", "generate.yaml", *args)
    assert result.code == 2 and key in result.err


def test_config_overrides_reach_the_model(run_generate):
    """With scaled positions, the memorized answers are lost."""
    overrides = "config_overrides={rope_scaling: {rope_type: linear, factor: 8.0}}"
    assert run_generate(overrides) != run_generate()


def test_answers_end_at_the_context_length(run_generate, workspace):
    """A warning counts them, with rewards too. Prompts that leave no space are errors with their row."""
    full = run_generate()
    run = ("run", "generate", "generate.yaml", "output_path=new/answers.jsonl", f"prompts={json.dumps(PROMPTS[:3])}")
    context = len(build.resolve_model(str(workspace.model))[2].encode_prompt([{"role": "user", "content": PROMPTS[0]}]))
    run += (f"config_overrides.max_position_embeddings={context + 2}",)
    for rewards in ("rewards=[]", "rewards=[{kind: length, min_tokens: 1}]"):
        result = workspace.run_tune(*run, rewards)
        assert result.code == 0 and f"context length of the model, {context + 2} tokens" in result.err, result.err
        rows = [json.loads(line) for line in (workspace.folder / "new/answers.jsonl").read_text().splitlines()]
        assert rows[0]["finish_reason"] == "length" and full[0]["answer"].startswith(rows[0]["answer"])
        assert full[0]["finish_reason"] == "stop"
    (workspace.folder / "source.jsonl").write_text(json.dumps({"prompt": PROMPTS[3]}))
    result = workspace.run_tune(*run, "source=source.jsonl")
    assert result.code == 2 and "source.jsonl:1" in result.err and "context length" in result.err


def test_tools_of_a_row_are_in_its_prompt(run_generate, workspace):
    template = "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}{{ messages[-1].content }}"
    (workspace.folder / "tools.jinja").write_text(template)
    messages = [{"role": "user", "content": "is"}]
    rows = [{"messages": messages, "tools": [{"name": "What"}]}, {"prompt": "What is"}]
    (workspace.folder / "source.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = run_generate("prompts=[]", "source=source.jsonl", "chat_template=tools.jinja")
    assert answers[0]["answer"] == answers[1]["answer"]
