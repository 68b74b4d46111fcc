"""Artifact keys: a typed allow-list, explained, and free of secrets and places (spec 09, trap 20)."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from tests.codegen.conftest import make_key
from treadle.codegen.config import CompileConfig, resolve_compile
from treadle.codegen.key import ArtifactKey, explain, key_from_fields, pairs
from treadle.ir.config import Role
from treadle.ir.errors import ArtifactError, ConfigError

CHANGES = {
    "kind": "native",
    "ir": "cd" * 32,
    "start": 2,
    "end": 65,
    "backend": "inductor",
    "pipeline": ("split",),
    "options": pairs({"simdlen": 512, "march": ""}),
    "target": "cpu:x86-64",
    "features": (),
    "toolchain": pairs({"torch": "2.11.0", "compiler": "12.2.0"}),
    "kernels": pairs({"linear": "onednn"}),
    "plugins": pairs({"some-passes": ("1.0", "ab" * 32)}),
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ArtifactKey)])
def test_every_field_changes_the_key(field: str) -> None:
    """C09-02, TRAP-20: any factor changes the key, in both orders, and going back gives the old key again."""
    changed = make_key(**{field: CHANGES[field]})
    assert changed.digest != make_key().digest
    assert dataclasses.replace(changed, **{field: getattr(make_key(), field)}).digest == make_key().digest


def test_explain_names_the_leaf_that_differs() -> None:
    """Acceptance 8"""
    assert [str(item) for item in explain(make_key(), make_key(options=CHANGES["options"]))] == ["options.simdlen: 256 -> 512"]
    assert [item.field for item in explain(make_key(), make_key(toolchain=CHANGES["toolchain"]))] == ["toolchain.torch"]
    assert explain(make_key(), make_key()) == []


def test_a_key_survives_its_stored_form() -> None:
    key = make_key(kernels=CHANGES["kernels"])
    assert key_from_fields(key.fields()) == key


def test_unknown_and_missing_fields_are_refused() -> None:
    fields = make_key().fields()
    with pytest.raises(ArtifactError, match="host"):
        key_from_fields({**fields, "host": "a"})
    del fields["ir"]
    with pytest.raises(ArtifactError, match="ir"):
        key_from_fields(fields)


@pytest.mark.parametrize("path", ["/home/somebody/model", "~/model"])
def test_a_path_cannot_enter(path: str) -> None:
    """Promise 7: building a key with a place in it is our bug, and stops."""
    with pytest.raises(AssertionError, match="path"):
        make_key(target=path)
    with pytest.raises(AssertionError, match="path"):
        make_key(options=pairs({"folder": ["x", path]}))


def test_the_environment_does_not_enter() -> None:
    """Acceptance 8: an API key and HOME set in the environment change no key."""
    code = "from tests.codegen.conftest import make_key; print(make_key().digest)"
    digests = set()
    for extra in ({}, {"HOME": "/nonexistent", "TREADLE_API_KEY": "secret", "OPENAI_API_KEY": "secret"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **extra}, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert digests == {make_key().digest}


def test_every_setting_has_a_role_and_words() -> None:
    """C09-02: the list of settings that may change code is written down; a new setting must take a side."""
    roles = {field.name: field.metadata["role"] for field in dataclasses.fields(CompileConfig)}
    assert {name for name, role in roles.items() if role is Role.KEY} == {
        "dtype", "target", "level", "backend", "max_num_batched_tokens", "exact_sizes", "disabled_passes", "extra_passes",
        "tensor_parallel_size", "quantization", "fuse_norm_quant", "fuse_act_quant", "fuse_all_reduce_norm",
    }  # fmt: skip
    assert all(field.metadata["doc"] for field in dataclasses.fields(CompileConfig))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"jobs": 0}, "jobs=0"),
        ({"exact_sizes": (0,)}, "exact_sizes"),
        ({"exact_sizes": (4096,)}, "exact_sizes"),
        ({"level": 7}, "level=7"),
        ({"dtype": "int3"}, "float32"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_settings_are_refused_by_name(asked: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_compile(asked)


def test_what_is_asked_wins_over_the_level() -> None:
    assert resolve_compile({"level": 0}).config.backend == "eager"
    resolved = resolve_compile({"level": 0, "backend": "inductor"})
    assert resolved.config.backend == "inductor"
    assert resolved.origins["backend"].source == "user" and resolve_compile({}).origins["backend"].source == "level 2"
