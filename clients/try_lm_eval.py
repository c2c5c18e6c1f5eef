# /// script
# dependencies = ["lm-eval[api]==0.4.13"]
#
# [tool.twostroke]
# model = "smollm2-135m"
# ///
"""`local-completions` with the server's tokenizer: multiple choice, perplexity, answers; `local-chat-completions`."""

import json
import os
import subprocess
from pathlib import Path

URL, MODEL = os.environ["OPENAI_BASE_URL"], os.environ["MODEL"]
os.environ["HF_DATASETS_CACHE"] = "cache"
ITEMS = [
    {"question": "The capital of France is", "choices": [" Paris.", " green.", " seven."], "gold": 0},
    {"question": "The opposite of hot is", "choices": [" Monday.", " cold.", " Berlin."], "gold": 1},
]
TEXT = "The cat sat on the mat. The dog sat on the rug. They looked at each other and said nothing at all."
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: question
doc_to_target: gold
doc_to_choice: choices
metric_list: [{metric: acc}]
""",
    "text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
}


def evaluate(kind: str, arguments: str, tasks: str, *options: str) -> dict[str, dict[str, float]]:
    command = ["lm_eval", "run", "--model", kind, "--include_path", ".", "--output_path", kind, "--tasks", tasks]
    subprocess.run([*command, "--model_args", f"model={MODEL},{arguments}", *options], check=True)
    [found] = Path(kind).rglob("results_*.json")
    return json.loads(found.read_text())["results"]


for name, task in TASKS.items():
    data = Path(f"{name}.jsonl").absolute()
    rows = [{"text": TEXT}] if name == "text" else ITEMS
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
    Path(f"{name}.yaml").write_text(source + task)

found = evaluate("local-completions", f"base_url={URL}/completions,num_concurrent=2", "choices,text,answers")
assert found["choices"]["acc,none"] == 1
assert 1 < found["text"]["word_perplexity,none"] < 100
assert 0 <= found["answers"]["exact_match,none"] <= 1
chat = f"base_url={URL}/chat/completions,num_concurrent=2"
found = evaluate("local-chat-completions", chat, "answers", "--apply_chat_template")
assert 0 <= found["answers"]["exact_match,none"] <= 1
