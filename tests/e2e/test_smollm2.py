"""`precis up` with the real model: upload a real document, restart, ask, get the right fact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.stack import wait_for
from workers.models import folder_of_default

pytestmark = pytest.mark.timeout(600)


class Up:
    """One `precis up` on a data directory."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.data_dir, self.options = data_dir, options
        self.ready_file = data_dir / "ready"
        self.log = data_dir / "up.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def precis(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the CLI against this server."""
        environment = {**clean_environment(), "PRECIS_URL": self.url, "COLUMNS": "80"}
        command = [str(Path(sys.executable).with_name("precis")), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    def start(self) -> None:
        """Start and wait until it is ready."""
        command = [str(Path(sys.executable).with_name("precis")), "up", "--port", "0", "--data-dir", str(self.data_dir)]
        command += ["--ready-file", str(self.ready_file), *self.options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=clean_environment(), stdout=log, stderr=log)
        try:
            wait_for(self.ready_file.exists, 240)
        except AssertionError:
            sys.stderr.write(self.log.read_text())
            raise
        self.url = self.ready_file.read_text().strip()

    def stop(self, number: int = signal.SIGINT) -> int:
        """Stop as Ctrl-C does; the exit code."""
        if self.process is None:
            return 0
        self.process.send_signal(number)
        code = self.process.wait(90)
        self.process = None
        return code

    def worker_pid(self) -> int | None:
        """Of the one worker; None while there is none."""
        found = httpx.get(f"{self.url}/v1/workers").json()["data"]
        return int(found[0]["pid"]) if found else None


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PRECIS_")}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    made = Up(tmp_path_factory.mktemp("data"))
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def context(up: Up) -> dict[str, Any]:
    """A real document of 1,700 tokens with one-off facts, in the default policy."""
    path = Path(__file__).parents[3] / "shared" / "evalset" / "dev" / "dev-novel1.txt"
    if not path.exists():
        pytest.skip("the evaluation set is not beside this checkout")
    done = up.precis("put", str(path), "--quiet")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = httpx.get(f"{up.url}/v1/contexts/{done.stdout.strip()}").json()
    return found


QUESTION, FACT = "How many grams of saffron does the recipe of Oscar Tanaka need?", "16 grams"


def ask(up: Up, context: dict[str, Any], question: str = QUESTION, **more: Any) -> httpx.Response:
    url = f"{up.url}/v1/contexts/{context['id']}/queries"
    return httpx.post(url, json={"question": question, "max_tokens": 24, **more}, timeout=120)


def test_the_default_snapshot_is_small_and_close(context: dict[str, Any]) -> None:
    assert len(context["policy"].pop("transform")) == 64
    assert context["policy"] == {"policy": "full", "keep_ratio": 1.0, "codec": "tc", "ratio": 16.0}
    assert 16 <= context["storage"]["ratio"] < 16.5
    assert context["fidelity"]["kl"] < 0.03
    assert context["fidelity"]["top1_agreement"] > 0.93
    assert context["model"] == "SmolLM2-135M-Instruct"


@pytest.mark.parametrize("text", ["Hi.", "The harbour lies in the north. " * 9])
def test_a_short_document_takes_what_it_needs(up: Up, text: str) -> None:
    made = httpx.post(f"{up.url}/v1/contexts?wait=60", json={"text": text}, timeout=90).json()
    assert made["status"] == "ready", made["error"]
    assert made["policy"]["codec"] == "tc"
    assert made["storage"]["ratio"] > 4
    assert ask(up, made, "What is said?").status_code == 200


def test_a_restarted_worker_answers_with_the_right_fact_from_the_store(up: Up, context: dict[str, Any]) -> None:
    first = ask(up, context)
    assert FACT in first.json()["text"]
    pid = up.worker_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: up.worker_pid() not in (None, pid), 90)
    again = ask(up, context)
    assert again.headers["x-cache"] == "hit; store"
    assert again.json()["text"] == first.json()["text"]
    assert "starting it again" in up.log.read_text()


def test_everything_survives_a_restart_of_the_whole(up: Up, context: dict[str, Any]) -> None:
    before = ask(up, context).json()["text"]
    assert up.stop() == 0
    assert not up.ready_file.exists()
    assert "stopped" in up.log.read_text()
    up.start()
    found = ask(up, context)
    assert found.headers["x-cache"] == "hit; store"
    assert found.json()["text"] == before


def test_streamed_and_unstreamed_answers_agree(up: Up, context: dict[str, Any]) -> None:
    whole = ask(up, context).json()["text"]
    streamed = ask(up, context, stream=True).text
    pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    assert "".join(piece.get("text", "") for piece in pieces) == whole
    assert len(pieces) > 5


@pytest.mark.parametrize("kind", ["quest", "cluster"])
def test_a_view_still_finds_the_fact(up: Up, context: dict[str, Any], kind: str) -> None:
    assert FACT in ask(up, context, view={"kind": kind, "budget": 256}).json()["text"]


def test_the_openai_sdk_gets_the_fact(up: Up, context: dict[str, Any]) -> None:
    sdk = openai.OpenAI(base_url=f"{up.url}/v1", api_key="unused")
    asked: dict[str, Any] = {
        "model": context["model"],
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"context": context["id"]},
    }
    whole = sdk.chat.completions.create(**asked)
    assert FACT in (whole.choices[0].message.content or "")
    chunks = list(sdk.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_the_command_line_shows_asks_lists_and_removes(up: Up, context: dict[str, Any]) -> None:
    answered = up.precis("ask", context["id"], QUESTION, "--max-tokens", "24")
    assert FACT in answered.stdout
    assert context["id"] in up.precis("ls").stdout
    assert json.loads(up.precis("show", context["id"], "--json").stdout)["id"] == context["id"]
    shown = up.precis("show", context["id"]).stdout
    assert "nats per token" in shown
    assert f"{context['storage']['ratio']:.1f}x" in shown
    assert "SmolLM2" in up.precis("models").stdout
    missing = up.precis("ask", "ctx_none", "x")
    assert missing.returncode == 1
    assert "there is no context ctx_none" in missing.stderr
    small = up.data_dir / "small.txt"
    small.write_text("The password of the vault is swordfish. " * 20)
    put = up.precis("put", str(small), "--policy", "snapkv", "--keep-ratio", "0.6")
    assert put.returncode == 0, put.stderr
    assert "fidelity" in put.stdout
    made = httpx.get(f"{up.url}/v1/contexts").json()["data"][0]
    assert (made["name"], made["policy"]["policy"]) == ("small.txt", "snapkv")
    removed = up.precis("rm", made["id"])
    assert "MB freed" in removed.stdout
    assert httpx.get(f"{up.url}/v1/contexts/{made['id']}").status_code == 404


def test_a_second_up_on_the_same_data_says_so(up: Up) -> None:
    done = up.precis("up", "--data-dir", str(up.data_dir), "--port", "0")
    assert done.returncode == 1
    assert f"already running on {up.data_dir}" in done.stdout.replace("\n", "")
    assert up.url in done.stdout


def test_a_taken_port_is_said_in_plain_words(up: Up, tmp_path: Path) -> None:
    done = up.precis("up", "--data-dir", str(tmp_path), "--port", up.url.rsplit(":", 1)[1])
    assert done.returncode == 1
    assert "choose another with --port" in done.stdout


def test_a_killed_supervisor_leaves_no_process_behind_and_the_data_stay(up: Up, context: dict[str, Any]) -> None:
    before = ask(up, context).json()["text"]
    pid = up.worker_pid()
    assert pid is not None
    up.stop(signal.SIGKILL)
    if sys.platform == "linux":
        wait_for(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid), 40)
    time.sleep(1)
    up.ready_file.unlink()
    up.start()
    assert ask(up, context).json()["text"] == before


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_misspelt_settings_stop_the_start(tmp_path: Path) -> None:
    for module in ("service.app", "workers"):
        done = subprocess.run(
            [sys.executable, "-m", module],
            env={**clean_environment(), "PRECIS_REDIS_ULR": "x"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert "PRECIS_REDIS_ULR" in done.stderr


def test_the_model_was_unpacked_once(up: Up) -> None:
    assert up.log.read_text().count("unpacking SmolLM2") == 1
    assert (folder_of_default(up.data_dir) / "model.safetensors").stat().st_size > 500e6
