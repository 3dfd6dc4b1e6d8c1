"""release.toml: crossed into cells, and everything that is wrong with it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.contract.errors import UsageError
from pipeline.release.cells import Cell, ModelNotInMatrix, cross, refuse_same_names, single
from pipeline.release.faults import TagsClash
from pipeline.release.matrixfile import MatrixInvalid, read_matrix
from pipeline.release.names import DEFAULT, DEFAULT_WITH_ENGINE

GOOD = """
registry = "registry.example/team/tuned"
move = ["{model}-latest"]

[gpus.h200]
name = "NVIDIA H200"
arch = "90a"
cache = "caches/{model}-tp{tp}-{gpu}"
verdict = ["verdicts", "more/{engine}.json"]

[gpus.h100]
arch = "90a"
cache = "caches/{model}-tp{tp}-{gpu}"

[engines.vllm]
base_image = "vllm/vllm-openai:v0.12.0"

[annotations]
"org.opencontainers.image.licenses" = "Apache-2.0"

[[cells]]
model = ["llama-3.1-8b", "Qwen3-8B"]
tp = [1, 2]
gpu = ["h200", "h100+h200"]
engine = "vllm"
max_tokens = 4096

[[cells]]
model = "tiny"
device = "cpu"
buckets = [1, 8]
bake_jit = false

[[exclude]]
model = "Qwen3-8B"
tp = 2
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "release.toml"
    path.write_text(text, encoding="utf-8")
    return path


def wrong(tmp_path: Path, text: str) -> list[str]:
    """What a matrix is refused for."""
    path = written(tmp_path, text)
    with pytest.raises(MatrixInvalid) as caught:
        cross(read_matrix(path), path)
    return list(caught.value.details) or [caught.value.message.removeprefix(f"{path}: ")]


def test_lists_are_crossed_and_what_is_excluded_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    cells = cross(read_matrix(path), path)
    assert [(cell.model, cell.tp, cell.gpu, cell.engine) for cell in cells] == [
        ("llama-3.1-8b", 1, "h200", "vllm"),
        ("llama-3.1-8b", 2, "h200", "vllm"),
        ("llama-3.1-8b", 1, "h100-h200", "vllm"),
        ("llama-3.1-8b", 2, "h100-h200", "vllm"),
        ("Qwen3-8B", 1, "h200", "vllm"),
        ("Qwen3-8B", 1, "h100-h200", "vllm"),
        ("tiny", 2, "", ""),  # tiny has two ranks unless another number is asked for
    ]


def test_gpu_types_of_one_cell_bring_their_caches_and_verdicts(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    cell = cross(read_matrix(path), path)[3]
    assert cell.caches == (tmp_path / "caches/llama-3.1-8b-tp2-h100", tmp_path / "caches/llama-3.1-8b-tp2-h200")
    assert cell.verdicts == (tmp_path / "verdicts", tmp_path / "more/vllm.json")
    assert cell.devices == ("NVIDIA H200",)
    assert cell.settings == {
        "tp": "2", "max_tokens": "4096", "device": "cuda", "arch": "90a",
        "base_image": "vllm/vllm-openai:v0.12.0", "accept_base_versions": False,
    }  # fmt: skip


def test_a_cells_own_settings_are_those_of_the_command_line(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    cell = cross(read_matrix(path), path)[-1]
    assert cell.settings == {"tp": "2", "device": "cpu", "buckets": "1,8", "no_bake_jit": True}
    assert cell.title == "tiny tp2 buckets 1,8"


@pytest.mark.parametrize(
    ("value", "spelled"),
    [
        ("8", "8"),
        ("[8, 1, 8]", "1,8"),
        ('"1,2,4,8-256:8,272-512:16"', "1,2,4,8-256:8,272-512:16"),
        ('[1, 2, 4, "8-256:8", "272-512:16"]', "1,2,4,8-256:8,272-512:16"),
        ("[8, 16, 24, 32]", "8-32:8"),
    ],
)
def test_buckets_are_counts_and_ranges_with_one_spelling(tmp_path: Path, value: str, spelled: str) -> None:
    path = written(tmp_path, f'[[cells]]\nmodel = "tiny"\nbuckets = {value}\n')
    (cell,) = cross(read_matrix(path), path)
    assert cell.settings["buckets"] == spelled


def test_an_engine_tunes_in_its_own_start_where_there_is_no_cache(tmp_path: Path) -> None:
    text = GOOD.replace('base_image = "vllm', 'start = "vllm"\nargs = "--max-model-len 4096"\nbase_image = "vllm')
    path = written(tmp_path, text + '\n[[cells]]\nmodel = "tiny"\nengine = "vllm"\n')
    cells = cross(read_matrix(path), path)
    assert "engine" not in cells[0].settings, "this one is baked from caches"
    assert (cells[-1].settings["engine"], cells[-1].settings["engine_args"]) == ("vllm", "--max-model-len 4096")


def test_models_choose_among_the_cells(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    matrix = read_matrix(path)
    assert {cell.model for cell in cross(matrix, path, models=["qwen3-8b"])} == {"Qwen3-8B"}
    assert cross(matrix, path, models=["tiny"], verdicts=[Path("v.json")])[0].verdicts == (Path("v.json"),)
    with pytest.raises(ModelNotInMatrix) as caught:
        cross(matrix, path, models=["qwen3-9b"])
    assert "did you mean Qwen3-8B?" in caught.value.hint


def test_every_error_of_the_shape_is_said_with_its_place(tmp_path: Path) -> None:
    found = wrong(
        tmp_path,
        'registy = "x"\n[gpus.h200]\narch = 90\n[[cells]]\nmodel = "tiny"\ntp = [1, 0]\nmax_token = 3\njudge = "yes"\n',
    )
    assert found == [
        "gpus.h200.arch: input should be a valid string",
        "cells[0].tp[1]: input should be greater than or equal to 1",
        "cells[0].judge: input should be 'on' or 'off'",
        "cells[0].max_token: there is no such key; did you mean max_tokens?",
        "registy: there is no such key; did you mean registry?",
    ]


def test_every_name_that_nothing_defines_is_said(tmp_path: Path) -> None:
    text = GOOD.replace('gpu = ["h200"', 'gpu = ["h20", "b200"').replace('engine = "vllm"', 'engine = "vlm"')
    assert wrong(tmp_path, text) == [
        "cells[0].gpu: there is no table [gpus.h20]; did you mean h200?",
        "cells[0].gpu: there is no table [gpus.b200]; did you mean h200?",
        "cells[0].engine: there is no table [engines.vlm]; did you mean vllm?",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[gpus.a]\narch = "90a"\n[gpus.b]\narch = "90a"\n[[cells]]\nmodel = "tiny"\ngpu = "a+b"\n', "has no cache"),
        ('[[cells]]\nmodel = "tiny"\n[[cells]]\nmodel = "tiny"\n', "tiny tp2: there are two such cells"),
        (
            '[[cells]]\nmodel = "tiny"\nbuckets = "8-32:8"\n[[cells]]\nmodel = "tiny"\nbuckets = [32, 24, 16, 8]\n',
            "tiny tp2 buckets 8-32:8: there are two such cells",
        ),
        ('[[cells]]\nmodel = "tiny"\nbuckets = [1, "8-16"]\n', "cells[0].buckets: buckets=8-16 has no step (8-16:1 is"),
        (
            '[[cells]]\nmodel = "tiny"\nbuckets = ["8-", 0]\n',
            "first-last:step, such as 1,2,4,8-256:8); buckets=0 is not an integer",
        ),
        ('[[cells]]\nmodel = "tiny"\nbuckets = [1.5]\n', "cells[0].buckets: input should be token counts and ranges"),
        ('[[cells]]\nmodel = "tiny"\nbuckets = [true]\n', "cells[0].buckets: input should be token counts and ranges"),
        ('[[cells]]\nmodel = "tiny"\nbuckets = []\n', "cells[0].buckets: there is no token count"),
        ('[[cells]]\nmodel = "tiny"\nbuckets = "{x}"\n', "cells[0].buckets: buckets={x} is not an integer"),
        ('[[cells]]\nmodel = "tiny"\n[[exclude]]\ntp = 4\n', "exclude[0] leaves out no cell"),
        ('[[cells]]\nmodel = "tiny"\ncache = "{modl}"\n', "'{modl}' is no path"),
        ('[[cells]]\nmodel = "tiny"\ncache = "{model.x}"\n', "is no path"),
        ('[[cells]]\nmodel = "tiny"\ncache = "{model.__class__}"\n', "is no path"),
        ('[[cells]]\nmodel = "tiny"\ncache = "{model:>99999999999}"\n', "is no path"),
        (f'[[cells]]\nmodel = "tiny"\ntp = {list(range(1, 1002))}\n', "crossed they are 1001 cells"),
        ("a = " + "[" * 100_000, "nested too deeply"),
        (
            '[gpus.a]\narch = "90a"\n[[cells]]\nmodel = "tiny"\ngpu = "a"\ndevice = "cpu"\n',
            "gpu decides device and arch",
        ),
        ("cells = []\n", "cells: list should have at least 1 item"),
        ("", "cells: field required"),
        ("[[cells]\n", "Expected"),
        (f'[[cells]]\nmodel = "tiny"\nbuckets = {"9" * 5000}\n', "4300 digits"),
        ("[[cells]]\nmodel = []\n", "should have at least 1 item"),
        ('[gpus."H 200"]\narch = "90a"\n[[cells]]\nmodel = "tiny"\n', "gpus.H 200: string should match pattern"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert any(said in line for line in wrong(tmp_path, text)), wrong(tmp_path, text)


def test_no_file_no_matrix(tmp_path: Path) -> None:
    with pytest.raises(MatrixInvalid, match="is no file"):
        read_matrix(Path("/dev/zero"))
    with pytest.raises(MatrixInvalid, match="No such file"):
        read_matrix(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'registry = "\xe9"')
    with pytest.raises(MatrixInvalid, match="not UTF-8"):
        read_matrix(tmp_path / "latin.toml")


def test_a_model_alone_is_a_cell() -> None:
    assert single("tiny", "", (), []) == Cell("tiny", 2)
    assert single("tiny", "4", (Path("c"),), [Path("v")]) == Cell("tiny", 4, caches=(Path("c"),), verdicts=(Path("v"),))


def test_cells_whose_tags_would_not_tell_them_apart_are_refused() -> None:
    vllm = Cell("m", 1, engine="vllm", settings={"base_image": "a"})
    sglang = Cell("m", 1, engine="sglang", settings={"base_image": "b"})
    with pytest.raises(TagsClash, match="m tp1 vllm and m tp1 sglang would have the same tag"):
        refuse_same_names([vllm, sglang], lambda _cell: DEFAULT)
    refuse_same_names([vllm, sglang], lambda _cell: DEFAULT_WITH_ENGINE)
    few, many = Cell("m", 1, settings={"buckets": "1"}), Cell("m", 1, settings={"buckets": "1,8"})
    refuse_same_names([few, many], lambda _cell: DEFAULT)  # their plans differ, so their keys do
    with pytest.raises(TagsClash):
        refuse_same_names([few, many], lambda _cell: "{model}-tp{tp}")
    assert issubclass(TagsClash, UsageError)
