# /// script
# dependencies = ["guidellm==0.8.1", "torch==2.13.0"]
#
# [tool.twostroke]
# model = "smollm2-135m"
# ///
"""`guidellm run`: streams of chat, completions and responses, synthetic prompts and answers of given lengths."""

import json
import os
import subprocess
from pathlib import Path

URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")

for kind in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={URL},request_format={kind}"]
    command += ["--tokenizer", f"kind=hf_auto,model={os.environ['TOKENIZER']}", "--disable-progress"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    subprocess.run([*command, "--output", "kind=json,path=report.json"], check=True)
    [benchmark] = json.loads(Path("report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0), kind
    assert benchmark["metrics"]["output_token_count"]["successful"]["total_sum"] == 6 * 8, kind
