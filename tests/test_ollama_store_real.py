"""The store that a real Ollama writes, of both generations, read without asking it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from server_helpers import running_ollama
from servers import binary

from localkv.gguf.ollama_store import find_ollama
from localkv.gguf.places import Places
from localkv.gguf.stores import model_names


@pytest.mark.engine
@pytest.mark.parametrize("old", [False, True], ids=["current", "older"])
def test_what_ollama_created_is_found_by_its_name(
    tmp_path: Path, smollm2_path: Path, run, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    program = binary("ollama-old" if old else "ollama")
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(f"FROM {smollm2_path}\nPARAMETER num_ctx 2048\nPARAMETER stop x\n")
    with running_ollama(tmp_path, old=old) as server:
        for name in ("tiny", "Me/Tiny:v1"):
            subprocess.run(
                [program, "create", name, "-f", modelfile],
                env={"HOME": str(tmp_path / "home"), "OLLAMA_HOST": server.url},
                check=True,
                capture_output=True,
                timeout=120,
            )
    store = str(tmp_path / "models")
    found = find_ollama("tiny", [store])
    assert Path(found.path).stat().st_size == smollm2_path.stat().st_size
    assert found.parameter("num_ctx") == 2048
    assert found.params["stop"] == ["x"]
    assert found.draft is None
    assert not found.projectors
    assert find_ollama("me/tiny:V1", [store]).path == found.path
    names = model_names(Places(ollama=(store,)))
    assert {name.lower() for name in names} >= {"ollama:tiny", "ollama:me/tiny:v1"}
    monkeypatch.setenv("OLLAMA_MODELS", store)
    code, out, err = run("models", "--json")
    assert code == 0, err
    rows = {row["argument"].lower(): row for row in json.loads(out)["models"]}
    assert rows["ollama:tiny"]["fits"] in ("RAM", "GPU", "no")
    assert rows["ollama:tiny"]["same_as"].lower() == "ollama:me/tiny:v1"
    code, out, err = run("predict", "ollama:tiny", "-c", "2048", "--json")
    assert code == 0, err
    assert json.loads(out)["model"]["path"] == found.path
