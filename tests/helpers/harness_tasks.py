"""Tasks in the format of lm-evaluation-harness, with their rows: multiple choice, generation and rolling likelihood."""

import json
from pathlib import Path
from random import Random

TASKS = {
    "sums": """
output_type: multiple_choice
doc_to_text: "What is {{ask}}?"
doc_to_choice: "{{choices}}"
doc_to_target: right
fewshot_split: test
num_fewshot: 1
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}, {metric: acc_norm, aggregation: mean}]
""",
    "said": """
output_type: generate_until
doc_to_text: "What is {{ask}}?"
doc_to_target: "{{answer}}"
fewshot_split: test
generation_kwargs: {until: [".", "so ", "<|user|>"], max_gen_toks: 20, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "read": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}


def write(folder: Path) -> Path:
    """Write three tasks and their rows. Some choices have one token and share a forward pass; one text exceeds a
    row.
    """
    rng, lines = Random(0), []
    for _ in range(10):
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        choices = [str(a + b + error) for error in (0, 1, 2, 30)]
        rng.shuffle(choices)
        sentences = [f"{rng.randint(0, 99)} + {b} is {a}. " for _ in range(rng.randint(1, 90))]
        text = "".join(sentences[: None if len(sentences) > 86 else 9])
        row = {"ask": f"{a} + {b}", "choices": choices, "right": choices.index(str(a + b)), "text": text}
        lines.append(json.dumps(row | {"answer": f"{a} + {b} = {a + b}"}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    for name, text in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}\n{text}")
    return folder
