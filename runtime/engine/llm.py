"""`LLM`: offline generation in this process, with vLLM's argument and attribute names."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treadle.codegen.bundle import Bundle, is_bundle
from treadle.ir.errors import UserError
from treadle.runtime.config import EngineConfig
from treadle.runtime.engine.core_client import InprocClient
from treadle.runtime.engine.input_processor import InputProcessor, ProcessedRequest, PromptInput
from treadle.runtime.engine.llm_arguments import split_arguments
from treadle.runtime.engine.model_info import ModelInfo
from treadle.runtime.engine.output_processor import OutputProcessor
from treadle.runtime.engine.progress import Progress
from treadle.runtime.engine.renderer_of import renderer_of
from treadle.runtime.executor.early_open import forget_opened, open_early
from treadle.runtime.levels import resolve_engine
from treadle.runtime.outputs import RequestOutput
from treadle.runtime.protocol import SchedulerStats
from treadle.runtime.renderer import Renderer
from treadle.runtime.sampling_params import RequestOutputKind, SamplingParams
from treadle.runtime.start_phases import phase_ended

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model ready to generate: from a bundle, or from a model folder, a GGUF file or an alias, compiled at need.

    Other keyword arguments are fields of `EngineConfig` and `CompileConfig`, also by vLLM's names for them. Raises
    UserError for one that is unknown or that this version cannot do. Close it with `shutdown` or use it in `with`.
    """

    def __init__(self, model: str | Path, *, dtype: str = "auto", max_model_len: int | None = None, **arguments: Any):
        engine, compiling = split_arguments({"dtype": dtype, "max_model_len": max_model_len, **arguments})
        path = model if is_bundle(model) else _compiled(model, compiling)
        config = resolve_engine({"bundle": str(path), **engine}).config
        bundle = open_early(config)
        try:
            _check_dtype(dtype, bundle)
            _check_ranks(compiling.get("tensor_parallel_size"), bundle)
            with ThreadPoolExecutor(1) as pool:  # the tokenizer is read while torch is imported
                renderer = pool.submit(renderer_of, bundle)
                self._setup(config, renderer.result)
        finally:
            forget_opened(config)

    @classmethod
    def from_config(cls, config: EngineConfig, renderer: Renderer | None = None) -> LLM:
        """An LLM over an explicit configuration; `renderer` may be left out when prompts are token ids."""
        llm = cls.__new__(cls)
        llm._setup(config, lambda: renderer)
        return llm

    def _setup(self, config: EngineConfig, load_renderer: Callable[[], Renderer | None]) -> None:
        self.config = config
        self._pid = os.getpid()
        self._turn = threading.RLock()  # the core takes one step at a time: threads take turns
        self._client: InprocClient | None = InprocClient(config)
        try:
            self.renderer = renderer = load_renderer()
            phase_ended("wait for the tokenizer")
        except UserError:
            self.shutdown()
            raise
        self.info: ModelInfo = self._client.info
        if renderer is not None:
            renderer.max_model_len = self.info.max_model_len
        self._inputs = InputProcessor(self.info, renderer, generation_config=config.generation_config)
        self._outputs = OutputProcessor(renderer)
        self._num_requests = 0

    # Generation

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt; the outputs stand in the order of the prompts.

        A prompt is text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}. Nothing runs unless
        all prompts are valid: raises UserError naming the first that is not. Calls from several threads take turns.
        """
        if lora_request is not None:
            raise UserError("lora_request is not available in this version; leave it out")
        listed = _as_list(prompts)
        params = _for_each(sampling_params, len(listed), "sampling_params")
        priorities = _for_each(priority, len(listed), "priority")
        requests = []
        for index, prompt in enumerate(listed):
            try:
                requests.append(self._process(prompt, params[index], priorities[index] or 0))
            except UserError as error:
                raise type(error)(f"prompt {index}: {error}") from error
        with self._turn:
            return self._run(requests, Progress.make(use_tqdm, len(requests)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of them, through the model's chat template."""
        if self.renderer is None:
            raise UserError("this model has no tokenizer, so it cannot chat; use generate with token ids")
        if chat_template is not None:
            raise UserError("chat_template cannot be chosen for a call; leave it out: the bundle's own template is used")
        if isinstance(messages, Mapping | str) or not isinstance(messages, Sequence):
            raise UserError(f"messages is a {type(messages).__name__}; give a list of messages, or a list of such lists")
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        rendered = [
            self.renderer.render_chat(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        prompts = [{"prompt": prompt.text, "prompt_token_ids": prompt.token_ids} for prompt in rendered]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def _process(self, prompt: PromptInput, params: SamplingParams | None, priority: int) -> ProcessedRequest:
        with self._turn:
            request_id, self._num_requests = str(self._num_requests), self._num_requests + 1
        request = self._inputs.process(prompt, params, request_id, priority=priority)
        request.params.output_kind = RequestOutputKind.FINAL_ONLY
        return request

    def _run(self, requests: list[ProcessedRequest], progress: Progress) -> list[RequestOutput]:
        client = self._open_client()
        found: dict[str, RequestOutput] = {}
        waiting = {request.request_id for request in requests}
        with progress, _interrupts_between_steps() as check_interrupt:
            try:
                for request in requests:
                    self._outputs.add(request)
                    for child in request.children:
                        client.add_request(child)
                while waiting:
                    check_interrupt()
                    done = self._outputs.process(client.step())
                    if done.to_abort:
                        client.abort(done.to_abort)
                    for request_id, error in done.errors.items():
                        raise type(error)(f"prompt {_place(requests, request_id)}: {error}")
                    for output in done.outputs:
                        found[output.request_id] = output
                        waiting.discard(output.request_id)
                        progress.advance(output)
            finally:
                self._abort([request.request_id for request in requests if request.request_id in self._outputs])
        return [found[request.request_id] for request in requests]

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests that an error or an interrupt left behind."""
        running = [child for request_id in request_ids for child in self._outputs.drop(request_id)]
        if running and self._client is not None:
            self._client.abort(running)

    # Information and life

    def get_tokenizer(self) -> Any:
        """The model's `tokenizers.Tokenizer`. Raises UserError if it has none."""
        if self.renderer is None:
            raise UserError("this model has no tokenizer")
        return self.renderer.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a prompt without parameters gets: the model's own defaults, or neutral ones."""
        return self._inputs.default_params()

    def stats(self) -> SchedulerStats:
        """Gauges of this moment and totals since the start."""
        with self._turn:
            return self._open_client().call("stats")

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes."""
        with self._turn:
            return self._open_client().call("reset_prefix_cache")

    def _open_client(self) -> InprocClient:
        if self._client is None:
            raise UserError("this LLM was shut down; make a new one")
        if self._pid != os.getpid():  # threads of the model do not survive a fork: a step would wait for ever
            raise UserError("this LLM belongs to the process that made it; make one here, after the fork")
        return self._client

    def shutdown(self) -> None:
        """Releases the model and the cache. May be called twice."""
        with self._turn:
            if self._client is not None and self._pid == os.getpid():
                self._client.shutdown()
            self._client = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _compiled(model: str | Path, settings: dict[str, Any]) -> Path:
    """A bundle of the model, beside the store; what the store already holds is not compiled again."""
    from treadle.codegen.compile import compile, default_output
    from treadle.codegen.store_location import default_store_root

    if "output" not in settings:
        root = Path(settings.get("store") or default_store_root(os.environ))
        folder = root.parent / "bundles" / _settings_name({**settings, "model": os.path.abspath(model)})
        folder.mkdir(parents=True, exist_ok=True)
        settings = {**settings, "output": folder / default_output(model), "force": True}
    return Path(compile(model, **settings))


def _settings_name(settings: dict[str, Any]) -> str:
    """A folder name for a model and settings, so that two bundles of one name do not replace each other."""
    text = json.dumps({name: str(value) for name, value in settings.items() if name != "store"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_dtype(dtype: str, bundle: Bundle) -> None:
    from treadle.codegen.config import IR_DTYPES

    made = bundle.manifest.model.dtype
    if dtype not in ("auto", made) and IR_DTYPES.get(dtype) != made:
        raise UserError(f"dtype={dtype!r} was asked for, but the bundle was compiled for {made}; compile it again")


def _check_ranks(asked: int | None, bundle: Bundle) -> None:
    made = bundle.manifest.num_ranks
    if asked not in (None, made):
        raise UserError(
            f"tensor_parallel_size={asked} was asked for, but the bundle was compiled for {made}; compile it again"
        )


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many: a list whose first member is an int is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UserError(f"prompts is a {type(prompts).__name__}; give text, token ids, a dict, or a list of those")
    listed = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _for_each(value: Any, count: int, name: str) -> list[Any]:
    if isinstance(value, Mapping | str):
        raise UserError(f"{name} is a {type(value).__name__}; give one object, or a list with one for each prompt")
    if value is None or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise UserError(f"{name} has {len(value)} entries for {count} prompts; give one for each, or a single one")
    return list(value)


def _place(requests: Sequence[ProcessedRequest], request_id: str) -> int:
    return next(index for index, request in enumerate(requests) if request.request_id == request_id)


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back while a step runs; the function that it gives raises KeyboardInterrupt if one came.

    An interrupt inside a step would leave scheduler and runner of different opinions. A second one gets through.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGINT)
    came = False

    def note(*_: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
        sys.stdout.flush()
