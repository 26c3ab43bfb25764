#!/usr/bin/env python3
"""Run the commands of a page as a reader would, and print them with what they say: `python docs/transcript.py`.

Those in blocks after `<!-- run -->`; servers after `<!-- serve -->` run until the end.  MODEL is the demo model, and
port 8000 one that is free.  Exit status 1 at the first command that fails.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from turboquant.demo import smollm2

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^<!-- (run|serve) -->\n```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = "8000"  # that the page names
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120",
}  # fmt: skip
START_LIMIT, STOP_LIMIT = 300, 60  # seconds
WITHOUT_COMPILING = " --enforce-eager"  # a minute less until a server answers


def commands(text: str) -> list[tuple[str, str]]:
    """(kind, command), with lines that are continued joined."""
    blocks = ((kind, body.replace("\\\n", " ")) for kind, body in BLOCK.findall(text))
    return [(kind, line) for kind, body in blocks for line in body.splitlines()]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def show(command: str) -> None:
    print(f"\n$ {command}", flush=True)


def run(command: str) -> None:
    show(command)
    start = time.monotonic()
    subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, check=True)
    print(f"[{time.monotonic() - start:.0f} s]", flush=True)


def serve(command: str, url: str) -> subprocess.Popen[bytes]:
    """A server that answers; what it says of turboquant is printed."""
    show(f"{command} &")
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        answers = wait_for(url, server)
        log.seek(0)
        lines = log.read().splitlines()
    if not answers:
        stop(server)
        raise RuntimeError("\n".join(["the server did not start:", *lines[-30:]]))
    print("\n".join(line for line in lines if "turboquant" in line and ":" in line))
    print(f"[answers after {time.monotonic() - start:.0f} s]", flush=True)
    return server


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_LIMIT)
    except subprocess.TimeoutExpired:
        server.kill()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return True
        except urllib.error.URLError:
            time.sleep(1)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?", default=ROOT / "docs/quickstart.md")
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    port, servers = free_port(), list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory() as folder:
        names = {"MODEL": str(smollm2()), PORT: port, "report.html": f"{folder}/report.html"}
        try:
            for kind, command in commands(arguments.page.read_text()):
                for name, value in names.items():
                    command = re.sub(rf"\b{re.escape(name)}\b", value, command)
                if kind == "serve":
                    servers.append(serve(command + WITHOUT_COMPILING, f"http://127.0.0.1:{port}/health"))
                else:
                    run(command)
        except (subprocess.CalledProcessError, RuntimeError) as error:
            sys.exit(str(error))
        finally:
            for server in servers:
                stop(server)


if __name__ == "__main__":
    main()
