# /// script
# dependencies = ["aiperf==0.13.0"]
#
# [tool.twostroke]
# model = "smollm2-135m"
# ///
"""`aiperf profile`: streams of chat, completions and responses, synthetic prompts, tokens as the server counts."""

import json
import os
import subprocess
from pathlib import Path

os.environ.pop("HF_HUB_OFFLINE", None)  # offline, it finds no tokenizer in a directory
URL, MODEL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["MODEL"]

for kind in ("chat", "completions", "responses"):
    command = ["aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", kind, "--streaming"]
    command += ["--tokenizer", os.environ["TOKENIZER"], "--use-server-token-count", "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "8"]
    command += ["--concurrency", "2", "--request-count", "6", "--artifact-dir", kind]
    subprocess.run(command, check=True)
    found = json.loads(Path(kind, "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 6, kind
    assert not found["error_summary"], kind
    if kind != "responses":  # it overlooks the usage of a response that ends incomplete, as these do
        assert found["output_sequence_length"]["avg"] <= 8, kind
    assert found["time_to_first_token"]["avg"] > 0, kind
