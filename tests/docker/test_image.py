"""The image's and the composition's files, read as text: no engine is needed, and no image is built."""

import json
import os
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
SECRET = re.compile(r"token|password|secret|key", re.IGNORECASE)

Instruction = tuple[str, str]


def parse_dockerfile(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = [line.strip().partition(" ") for line in joined.splitlines()]
    return [(word.upper(), rest.strip()) for word, _, rest in parts]


@pytest.fixture(scope="module")
def dockerfile() -> list[Instruction]:
    return parse_dockerfile((DOCKER / "Dockerfile").read_text())


def of_last_stage(instructions: list[Instruction]) -> list[Instruction]:
    last = max(index for index, (word, _) in enumerate(instructions) if word == "FROM")
    return instructions[last:]


def values(instructions: list[Instruction], word: str) -> list[str]:
    return [rest for found, rest in instructions if found == word]


def test_the_image_is_built_in_two_stages_and_the_last_starts_clean(dockerfile: list[Instruction]) -> None:
    assert values(dockerfile, "FROM") == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]
    assert [arg for arg in values(dockerfile, "ARG") if arg.startswith("PYTHON_IMAGE=python:3.1")] != []
    assert not [line for line in values(of_last_stage(dockerfile), "RUN") if "pip install" in line]


def test_torch_comes_from_the_index_given_at_build_time(dockerfile: list[Instruction]) -> None:
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in values(dockerfile, "ARG")
    installs = [line for line in values(dockerfile, "RUN") if "pip install" in line]
    assert '--index-url "$TORCH_INDEX"' in installs[0]
    assert installs[0].endswith(" torch")
    assert all("-c constraints.txt" in line for line in installs)


def test_the_service_runs_as_an_ordinary_user_that_owns_its_data(dockerfile: list[Instruction]) -> None:
    last = of_last_stage(dockerfile)
    assert values(last, "USER") == ["autotune"]
    assert "useradd --system --uid 10001" in values(last, "RUN")[0]
    assert "install -d -o autotune -g autotune -m 0700 /data" in values(last, "RUN")[0]
    assert values(last, "VOLUME") == ["/data"]
    # Everything root does comes before the switch.
    words = [word for word, _ in last]
    assert words.index("USER") > max(words.index("RUN"), words.index("COPY"))


def test_no_secret_is_baked_in(dockerfile: list[Instruction]) -> None:
    settings = [rest for word in ("ENV", "ARG") for rest in values(dockerfile, word)]
    assert not [line for line in settings if SECRET.search(line)]


def health_check(instructions: list[Instruction]) -> list[str]:
    (check,) = values(of_last_stage(instructions), "HEALTHCHECK")
    command: list[str] = json.loads(check.partition("CMD ")[2])
    return command


def test_the_health_check_asks_the_service_itself(dockerfile: list[Instruction]) -> None:
    command = health_check(dockerfile)
    assert command[:2] == ["python", "-c"]
    assert "/healthz" in command[2]
    compile(command[2], "HEALTHCHECK", "exec")


def test_the_entrypoint_is_there_and_executable(dockerfile: list[Instruction]) -> None:
    assert values(dockerfile, "ENTRYPOINT") == ['["/usr/local/bin/autotune-entrypoint"]']
    assert "docker/entrypoint /usr/local/bin/autotune-entrypoint" in values(dockerfile, "COPY")
    assert os.access(DOCKER / "entrypoint", os.X_OK)


def test_what_is_copied_exists_and_is_not_ignored(dockerfile: list[Instruction]) -> None:
    sources = [source for line in values(dockerfile, "COPY") if not line.startswith("--from")
               for source in line.split()[:-1]]
    assert set(sources) >= {"engine", "autotune", "web", "alembic", "constraints.txt", "pyproject.toml"}
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in kept), f"{source} is left out by .dockerignore"


def test_nothing_is_sent_to_the_build_unless_listed() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    assert not {"!data", "!.git", "!.venv"} & set(lines)


# --- compose --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return loaded


def test_compose_runs_the_service_and_postgresql_16(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"database", "autotune"}
    assert services["database"]["image"].startswith("postgres:16")
    build = services["autotune"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).samefile(DOCKER / "Dockerfile")


def test_no_password_or_token_has_a_default(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for name, value in service["environment"].items():
            if SECRET.search(name):
                assert re.match(r"\$\{\w+:\?.+\}$", value), f"{name} must come from the environment: {value}"
    assert not re.search(r"://\w+:", (DOCKER / "compose.yaml").read_text())


def test_the_service_waits_for_a_healthy_database(compose: dict[str, Any]) -> None:
    database = compose["services"]["database"]
    assert database["healthcheck"]["test"][1] == "pg_isready"
    assert compose["services"]["autotune"]["depends_on"] == {"database": {"condition": "service_healthy"}}


def test_data_lies_in_named_volumes(compose: dict[str, Any]) -> None:
    mounts = [mount.partition(":") for service in compose["services"].values() for mount in service["volumes"]]
    assert {name: target for name, _, target in mounts} == {"database": "/var/lib/postgresql/data", "data": "/data"}
    assert set(compose["volumes"]) == {"database", "data"}


def test_only_the_service_is_published_and_only_on_loopback(compose: dict[str, Any]) -> None:
    assert "ports" not in compose["services"]["database"]
    assert all(port.startswith("127.0.0.1:") for port in compose["services"]["autotune"]["ports"])


def test_the_gpu_file_changes_only_the_service() -> None:
    loaded = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text())
    assert set(loaded["services"]) == {"autotune"}
    assert loaded["services"]["autotune"]["build"]["args"]["TORCH_INDEX"] == "https://pypi.org/simple"
    (device,) = loaded["services"]["autotune"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def has_compose() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "compose", "version"], capture_output=True, check=False,
                                                 timeout=30).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="needs the docker compose client (no engine)")
@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.cuda.yaml"]])
def test_compose_itself_accepts_the_files(files: list[str]) -> None:
    command = ["docker", "compose", *(part for file in files for part in ("-f", str(DOCKER / file))), "config", "-q"]
    environment = {**os.environ, "POSTGRES_PASSWORD": "p", "AUTOTUNE_TOKEN": "t" * 32}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    del environment["POSTGRES_PASSWORD"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "POSTGRES_PASSWORD" in done.stderr
