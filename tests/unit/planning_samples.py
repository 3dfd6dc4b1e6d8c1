"""Plans and configs that the tests of planning share."""

import json

from pipeline.contract.plan import Layout
from pipeline.flashinfer.gpus import find_arch
from pipeline.planning import make_plan
from pipeline.planning.model_source import find_model
from pipeline.planning.ops import Target

OLD, NEW = "0.6.16.post3", "0.7.4"


def plan_of(model, *, arch="90a", version=OLD, **options):
    layout = Layout(**{name: options.pop(name) for name in ("tp", "ep", "pp", "dp") if name in options})
    target = Target("cpu", arch) if arch.startswith("cpu") else Target("cuda", find_arch(arch))
    return make_plan(model, layout=layout, target=target, flashinfer_version=version, **options)


def config_of(tmp_path, base, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**find_model(base).config, **changes}))
    return str(path)


def reasons(plan):
    return {name: part.reason for part in plan.untuned for name in part.name.split("+")}


def ops(plan):
    return {name: op for op in plan.ops for name in op.name.split("+")}


def fp8(quant_method="modelopt", **more):
    return {"quantization_config": {"quant_method": quant_method, "quant_algo": "FP8", **more}}


def write_config(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)
