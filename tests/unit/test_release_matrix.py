"""release.toml: expanded into cells, and everything that is wrong with it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.contract.errors import UsageError
from pipeline.release.matrix import Cell, read_matrix, single

GOOD = """
registry = "registry.example/team/tuned"
floating = ["{model}-latest"]

[gpus.h200]
name = "NVIDIA H200"
arch = "h200"
cache = "caches/{model}-tp{tp}-{gpu}"
verdict = ["verdicts", "more/{server}.json"]

[gpus.h100]
arch = "90a"
cache = "caches/{model}-tp{tp}-{gpu}"

[servers.vllm]
base_image = "vllm/vllm-openai:v0.12.0"

[annotations]
"org.opencontainers.image.licenses" = "Apache-2.0"

[[cells]]
model = ["llama-3.1-8b", "Qwen3-8B"]
tp = [1, 2]
gpu = ["h200", "h100+h200"]
server = "vllm"
max_tokens = 4096

[[cells]]
model = "tiny"
device = "cpu"
buckets = [1, 8]
bake_jit = false
platform = ["amd64", "arm64"]
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "release.toml"
    path.write_text(text, encoding="utf-8")
    return path


def cells_of(tmp_path: Path, text: str = GOOD) -> tuple[Cell, ...]:
    return read_matrix(written(tmp_path, text))[1]


def wrong(tmp_path: Path, text: str) -> list[str]:
    """What a matrix is refused for."""
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_matrix(path)
    return list(caught.value.details) or [caught.value.message.removeprefix(f"{path}: ")]


def test_lists_give_a_cell_for_each_combination(tmp_path: Path) -> None:
    cells = cells_of(tmp_path)
    assert [cell.name for cell in cells] == [
        "llama-3.1-8b-tp1-h200-vllm",
        "llama-3.1-8b-tp2-h200-vllm",
        "llama-3.1-8b-tp1-h100-h200-vllm",
        "llama-3.1-8b-tp2-h100-h200-vllm",
        "qwen3-8b-tp1-h200-vllm",
        "qwen3-8b-tp2-h200-vllm",
        "qwen3-8b-tp1-h100-h200-vllm",
        "qwen3-8b-tp2-h100-h200-vllm",
        "tiny-tp2-amd64",  # tiny has two ranks unless another number is asked for
        "tiny-tp2-arm64",
    ]
    assert [cells[at].device for at in (0, 2, 8)] == ["NVIDIA H200", "NVIDIA H200", "a CPU, amd64"]
    assert {cell.group for cell in cells[8:]} == {"tiny-tp2"}


def test_a_cell_has_its_caches_verdicts_and_settings(tmp_path: Path) -> None:
    cells = cells_of(tmp_path)
    assert cells[3].caches == (tmp_path / "caches/llama-3.1-8b-tp2-h100", tmp_path / "caches/llama-3.1-8b-tp2-h200")
    assert cells[3].verdicts == (tmp_path / "verdicts", tmp_path / "more/vllm.json")
    assert cells[3].devices == ("NVIDIA H200",)
    assert cells[3].settings == {
        "tp": "2", "max_tokens": "4096", "device": "cuda", "arch": "90a",
        "base_image": "vllm/vllm-openai:v0.12.0", "accept_base_versions": False,
    }  # fmt: skip
    assert cells[-1].settings == {"tp": "2", "device": "cpu", "buckets": "1,8", "no_bake_jit": True}


def test_a_server_warms_up_in_its_own_start_here_or_in_place_elsewhere(tmp_path: Path) -> None:
    text = GOOD.replace(
        'base_image = "vllm', 'start = "vllm"\nargs = "--tensor-parallel-size {tp}"\nbase_image = "vllm'
    )
    cells = cells_of(tmp_path, text + '\n[[cells]]\nmodel = "./models/m"\ntp = 4\nserver = "vllm"\n')
    assert cells[0].settings["server"] == "vllm" and cells[0].caches, "this one is baked from what it left elsewhere"
    made = cells[-1].settings
    assert (made["server"], made["server_args"], made["server_env"]) == ("vllm", "--tensor-parallel-size 4", "")
    assert "tp" not in made, "its arguments say it"
    assert (cells[-1].name, cells[-1].model) == ("m-tp4-vllm", str(tmp_path / "models/m"))


def test_every_error_of_the_shape_is_said_with_its_place(tmp_path: Path) -> None:
    found = wrong(
        tmp_path,
        'registy = "x"\n[gpus.h200]\narch = 90\n[[cells]]\nmodel = "tiny"\ntp = [1, 0]\nmax_token = 3\ncompare = "yes"\n',
    )
    assert found == [
        "gpus.h200.arch: input should be a valid string",
        "cells[0].tp[1]: input should be greater than or equal to 1",
        "cells[0].compare: input should be 'on' or 'off'",
        "cells[0].max_token: there is no such key; did you mean max_tokens?",
        "registy: there is no such key; did you mean registry?",
    ]


def test_every_unknown_name_is_said(tmp_path: Path) -> None:
    text = GOOD.replace('gpu = ["h200"', 'gpu = ["h20", "b200"').replace('server = "vllm"', 'server = "vlm"')
    assert wrong(tmp_path, text) == [
        "cells[0].gpu: there is no table [gpus.h20]; did you mean h200?",
        "cells[0].gpu: there is no table [gpus.b200]; did you mean h200?",
        "cells[0].server: there is no table [servers.vlm]; did you mean vllm?",
    ]


TINY = '[[cells]]\nmodel = "tiny"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'[gpus.a]\narch = "90a"\n[gpus.b]\narch = "90a"\n{TINY}gpu = "a+b"\n', "has no cache"),
        (TINY + TINY, "duplicate cell tiny-tp2"),
        (f"{TINY}buckets = [1.5]\n", "cells[0].buckets[0]"),
        (f"{TINY}buckets = []\n", "cells[0].buckets: value should have at least 1 item"),
        (f'{TINY}cache = "{{modl}}"\n', "'{modl}' is not a path"),
        (f'{TINY}cache = "{{model.__class__}}"\n', "is not a path"),
        (f'{TINY}cache = "{{model:>99999999999}}"\n', "is not a path"),
        (f"{TINY}tp = {list(range(1, 1002))}\n", "the matrix expands to 1001 cells (limit 1000)"),
        (f'{TINY}device = "cuda"\n', "which GPU?"),
        (f'{TINY}platform = "riscv64"\n', "cells[0].platform[0]: input should be 'amd64' or 'arm64'"),
        ("a = " + "[" * 100_000, "is not TOML: "),
        (f'[gpus.a]\narch = "90a"\n{TINY}gpu = "a"\ndevice = "cpu"\n', "gpu decides device and arch"),
        (f'[annotations]\n"io.github.tuned-image-pipeline.inputs" = "x"\n{TINY}', "set by the release itself"),
        (f'[annotations]\n"a b" = "x"\n{TINY}', "annotations.a b: string should match pattern"),
        (f'[annotations]\na = "x\\ny"\n{TINY}', "annotations.a: string should match pattern"),
        ("cells = []\n", "cells: list should have at least 1 item"),
        ("", "cells: field required"),
        ("[[cells]\n", "Expected"),
        (f"{TINY}buckets = {'9' * 5000}\n", "4300 digits"),
        (f'[gpus."H 200"]\narch = "90a"\n{TINY}', "gpus.H 200: string should match pattern"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert any(said in line for line in wrong(tmp_path, text)), wrong(tmp_path, text)


def test_a_name_distinguishes_tables(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, f"{TINY}buckets = 1\n{TINY}buckets = 8\n".replace("buckets = 8", 'name = "eight"'))
    assert [cell.name for cell in cells] == ["tiny-tp2", "tiny-tp2-eight"]


def test_no_file_no_matrix(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        read_matrix(Path("/dev/zero"))
    with pytest.raises(UsageError, match="No such file"):
        read_matrix(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'registry = "\xe9"')
    with pytest.raises(UsageError, match="is not TOML"):
        read_matrix(tmp_path / "latin.toml")


def test_a_model_alone_is_a_cell() -> None:
    assert single("tiny", "") == Cell("tiny-tp2", "tiny", 2)
    assert single("meta-llama/Llama-3.1-8B", "4", caches=(Path("c"),)).name == "llama-3.1-8b-tp4"
