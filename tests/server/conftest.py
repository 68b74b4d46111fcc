"""A server over a FakeEngine on a loopback port, in a thread. A real one can take its place through `base_url`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.server.fake_engine import EOS, FakeEngine, FakeInfo
from tests.server.tiny_tokenizer import SMOLLM2_TEMPLATE, write_tokenizer
from treadle.runtime.renderer import Renderer
from treadle.server.api import create_app
from treadle.server.config import ServerConfig
from treadle.server.launch import _Server, listen


class RunningServer:
    """A server in a thread of its own; `engine` and `state` may be looked at from the test."""

    def __init__(self, engine: FakeEngine, config: ServerConfig):
        self.engine = engine
        self.app = create_app(engine, config)
        self.state = self.app.state.server
        self.listener = listen(config)
        self.listener.listen()
        self.base_url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        settings = uvicorn.Config(
            self.app, lifespan="off", log_config=None, access_log=False, http="httptools", timeout_graceful_shutdown=1
        )
        self._server = _Server(settings, self.state)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        httpx.get(self.base_url + "/version", timeout=10, verify=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    def _run(self) -> None:
        self._loop.run_until_complete(self._server.serve(sockets=[self.listener]))
        self._loop.close()


StartServer = Callable[..., RunningServer]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers: `config` for the server, `template` and `generation_config` for its folder, the rest for the engine."""
    with ExitStack() as stack:

        def start(
            config: dict[str, Any] | None = None,
            template: str | None = SMOLLM2_TEMPLATE,
            generation_config: dict[str, Any] | None = None,
            **engine: Any,
        ) -> RunningServer:
            folder = write_tokenizer(tmp_path / "tokenizer", template, generation_config)
            renderer = Renderer.load(folder)
            renderer.warm_up()
            settings = ServerConfig(**{"port": 0, **(config or {})})
            return stack.enter_context(RunningServer(FakeEngine(renderer, **engine), settings))

        yield start


@pytest.fixture
def answering(start_server: StartServer) -> Any:
    """A server whose model writes one text, whatever it is asked."""

    def start(text: str, **options: Any) -> RunningServer:
        server = start_server(info=FakeInfo(max_model_len=4096), **options)
        server.engine.script = [*server.engine.renderer.encode(text), EOS]
        return server

    return start


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for the tests that change nothing about it."""
    renderer = Renderer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    renderer.warm_up()
    with RunningServer(FakeEngine(renderer, delay=0.001), ServerConfig(port=0)) as server:
        yield server


@pytest.fixture
def base_url(shared_server: RunningServer) -> str:
    """Where the scenarios send their requests; another module may point it at a real server."""
    return shared_server.base_url
