"""Runs a whole server process over a FakeEngine: `serve_fake.py FOLDER DELAY DRAIN_TIMEOUT`. Prints its port."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from tests.server.fake_engine import FakeEngine
from treadle.runtime.renderer import Renderer
from treadle.server.config import ServerConfig
from treadle.server.launch import listen, run_server, start_engine


async def main(folder: str, delay: str, drain: str) -> int:
    config = ServerConfig(port=0, drain_timeout=float(drain), dead_grace=0.5)
    engine = FakeEngine(Renderer.load(Path(folder)), delay=float(delay))
    assert await start_engine(engine)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.crash)
    listener = listen(config)
    print(listener.getsockname()[1], flush=True)
    code = await run_server(engine, config, listener)
    assert engine.shut_down and not (code == 0 and engine.running)
    return code


if __name__ == "__main__":
    sys.exit(uvloop.run(main(*sys.argv[1:])))
