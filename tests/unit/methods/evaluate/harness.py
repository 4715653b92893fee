"""Tasks of the lm-evaluation-harness."""

from __future__ import annotations

CHOICE = """
task: parity
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [even, odd]
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


REPLY = """
task: echo
dataset_path: json
dataset_kwargs: {data_files: {test: [questions.jsonl]}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "even"
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
