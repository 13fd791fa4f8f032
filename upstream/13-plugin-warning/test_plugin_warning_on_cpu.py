# Copyright 2026 Bytedance Ltd. and/or its affiliates
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

import importlib
import importlib.metadata
import logging

import pytest

import verl


class _EntryPoint:
    def __init__(self, name, error=None):
        self.name, self.error, self.loads = name, error, 0

    def load(self):
        self.loads += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def import_verl(monkeypatch, caplog):
    """Import verl anew with these plugins; what it logs from WARNING up."""

    def run(*plugins, policy="auto"):
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
        monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
        with caplog.at_level(logging.WARNING, logger="verl"):
            importlib.reload(verl)
        return [record for record in caplog.records if record.name == "verl" and record.levelno >= logging.WARNING]

    yield run
    monkeypatch.undo()


def test_a_plugin_that_fails_is_named_with_its_error(import_verl):
    good = _EntryPoint("good")
    (record,) = import_verl(_EntryPoint("bad", ImportError("no module named 'gone'")), good)

    assert "'bad'" in record.getMessage() and "no module named 'gone'" in record.getMessage()
    assert record.exc_info[0] is ImportError
    assert good.loads == 1  # and verl goes on


def test_plugins_that_load_or_are_not_wanted_say_nothing(import_verl):
    bad = _EntryPoint("bad", ImportError("x"))
    assert import_verl(_EntryPoint("good"), bad, policy="good") == []
    assert import_verl(bad, policy="none") == []
    assert bad.loads == 0
