"""Answers to many prompts: the same whatever their company, the same for the same seed, in a file or printed."""

import json

import pytest

PROMPTS = ["What is 1 plus 1?", "What is 4 plus 16?", "Why?", "What is a day? " * 9]


@pytest.fixture
def generate(work, learnt):
    """The answers that are written with some options, in the order of the prompts."""
    lines = [f"model: {learnt}", f"prompts: {json.dumps(PROMPTS)}", "device: cpu", "precision: {compute_dtype: fp32}"]
    lines += ["sampling: {max_new_tokens: 12}", "recipe: generate"]
    (work.folder / "generate.yaml").write_text("\n".join(lines))

    def call(*words):
        done = work.tune("run", "generate", "generate.yaml", "output_path=new/answers.jsonl", *words)
        assert done.code == 0, done.err
        assert done.err == "", "bars are for terminals"
        rows = [json.loads(line) for line in (work.folder / "new/answers.jsonl").read_text().splitlines()]
        assert done.out == f"{len(rows)} answers in new/answers.jsonl\n"
        return rows

    return call


def test_what_was_learnt_is_answered(generate):
    rows = generate()
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["answer"] for row in rows[:2]] == ["It is 2!", "It is 20!"]


def test_greedy_answers_do_not_depend_on_their_company(generate):
    rows = generate()
    for batch in (1, 2, 3):
        assert generate(f"batch_size={batch}") == rows
    (last,) = generate(f"prompts={json.dumps(PROMPTS[3:])}")
    assert last == rows[3]


def test_a_seed_gives_the_same_draws(generate):
    drawn = ("sampling={temperature: 1.5, max_new_tokens: 12, seed: 5}", "batch_size=4")
    rows = generate(*drawn)
    assert generate(*drawn) == rows
    assert generate(*drawn, "batch_size=1") == rows
    assert generate(*drawn, "sampling.seed=6") != rows
    twice = generate(*drawn, f"prompts={json.dumps(PROMPTS[2:3] * 2)}")
    assert twice[0]["answer"] != twice[1]["answer"], "the same question twice is two draws"


def test_rows_of_a_file(generate, work):
    asked = [{"role": "user", "content": PROMPTS[0]}]
    rows = [
        {"messages": [*asked, {"role": "assistant", "content": "No."}]},
        {"messages": asked},
        {"prompt": PROMPTS[1]},
    ]
    (work.folder / "source.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = generate("prompts=[]", "source=source.jsonl")
    assert [row["answer"] for row in found] == ["It is 2!", "It is 2!", "It is 20!"]


def test_printed(work, generate):
    generate()
    done = work.tune("run", "generate", "generate.yaml", f"prompts={json.dumps(PROMPTS[:1])}")
    assert done.out == "> What is 1 plus 1?\nIt is 2!\n\n"


def test_raw_prompts_go_on(work, generate):
    """Without the template there is no turn, and other text comes."""
    template = generate("prompts=[It is]")
    assert generate("prompts=[It is]", "apply_chat_template=false") != template
