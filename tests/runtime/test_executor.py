"""Executors: from a configuration value to a class, and the one that calls its worker directly."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.runtime.toy_model import ToyExecutor, toy_config
from treadle.ir.config import resolve
from treadle.ir.errors import ConfigError
from treadle.runtime.config import EngineConfig
from treadle.runtime.executor.interface import Executor
from treadle.runtime.executor.names import executor_name
from treadle.runtime.executor.selection import select_executor
from treadle.runtime.executor.uni import UniExecutor


def test_each_value_picks_its_class():
    """C04-01, R-4.2: a name, a class, and a qualified name with either separator."""
    assert select_executor("uni") is UniExecutor
    assert select_executor(ToyExecutor) is ToyExecutor
    for name in ("tests.runtime.toy_model:ToyExecutor", "tests.runtime.toy_model.ToyExecutor"):
        assert select_executor(name) is ToyExecutor
    assert select_executor(executor_name(ToyExecutor)) is ToyExecutor


@pytest.mark.parametrize("value", ["nothing", "no.such.module", "tests.runtime.toy_model:Nothing", 7, None])
def test_bad_values_are_value_errors(value):
    """C04-01: anything that fits nothing is a ValueError naming the choices or the cause."""
    with pytest.raises(ValueError, match="executor"):
        select_executor(value)


@pytest.mark.parametrize("name", ["ray", "external_launcher"])
def test_planned_executors_are_refused_clearly(name):
    with pytest.raises(ConfigError, match="not available in this version"):
        select_executor(name)


def test_a_class_that_is_no_executor_is_a_type_error():
    """C04-01: R-4.2 asks for TypeError."""
    with pytest.raises(TypeError, match="not a subclass of Executor"):
        select_executor(dict)
    with pytest.raises(TypeError):
        select_executor("builtins:dict")


def test_tasks_are_asked_for_once():
    """C04-01, R-4.7: one call to the workers, then the cached list."""
    calls = []

    class Counting(ToyExecutor):
        def collective_rpc(self, method, *args):
            calls.append(method)
            return super().collective_rpc(method, *args)

    executor = Counting(toy_config())
    executor.start()
    assert executor.supported_tasks == executor.supported_tasks == ["generate"]
    assert calls == ["supported_tasks"]


def test_flags_are_a_contract():
    """C04-01, R-4.40: upper layers read the class flags."""
    assert (Executor.uses_ray, Executor.supports_pp, UniExecutor.uses_ray) == (False, False, False)


def test_configuration_rejects_unknown_and_impossible_values():
    """Unknown keys, wrong types, values outside the choices and out of range are errors naming the field."""
    for asked, match in [
        ({"max_num_seq": 3}, "max_num_seq"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"scheduling_policy": "lifo"}, "fcfs, priority"),
        ({"watermark": 1.0}, "watermark"),
        ({"block_size": "16"}, "block_size"),
    ]:
        with pytest.raises(ConfigError, match=match):
            resolve(EngineConfig, {"bundle": "b", **asked})


def test_front_end_modules_load_no_torch():
    """C02-02: whatever the API process imports stays free of torch and of model code."""
    code = (
        "import sys, treadle.runtime.engine.async_engine, treadle.runtime.config, treadle.runtime.executor.names;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
