"""`python -m docs.picture`: draw docs/serve.svg, a terminal in which a model is served and asked.

The text is what `dynamo serve` prints and answers on this machine, at port 8000; paths and process ids are left out.
"""

import io
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
from rich import console, text

TARGET = Path(__file__).parent / "serve.svg"
QUESTION = "Tell me a story about a brave cat"
WIDTH = 100


def main() -> None:
    """Serve, ask, and draw."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    start = "from dynamo.cli.main import main; main()"
    flags = ["serve", "--http-port", str(port), "--prefill", "1", "--decode", "1"]
    serve = subprocess.Popen(
        [sys.executable, "-c", start, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        printed = read_until_ready(serve)
        body = {
            "model": "storyteller",
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
        }
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=60).raise_for_status().json()
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.wait()
    draw(
        printed.replace(str(port), "8000"),
        json.dumps(body),
        answer["choices"][0]["message"]["content"],
    )


def read_until_ready(serve: subprocess.Popen[str]) -> str:
    """Return what `dynamo serve` prints when it is ready, without paths and process ids."""
    assert serve.stdout is not None
    lines = []
    for line in serve.stdout:
        if line.strip().startswith("curl"):
            break
        if not re.match(r"dynamo: |\[| *(pids|join|engine|namespace) ", line):
            lines.append(line.rstrip())
    return "\n".join(lines).strip()


def draw(printed: str, body: str, story: str) -> None:
    """Write the picture."""
    screen = console.Console(record=True, width=WIDTH, file=io.StringIO())
    screen.print("$ [bold]make run[/]", highlight=False)
    screen.print(text.Text(printed))
    screen.print()
    command = f"curl -s http://127.0.0.1:8000/v1/chat/completions -d '{body}' | jq -r .choices[0].message.content"
    screen.print(text.Text.assemble("$ ", (command, "bold")))
    screen.print(text.Text(story))
    picture = screen.export_svg(title="dynamo")
    TARGET.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))
    sys.stdout.write(f"wrote {TARGET}\n")


if __name__ == "__main__":
    main()
