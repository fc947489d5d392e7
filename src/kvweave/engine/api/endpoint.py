"""The endpoint: OpenAI's completions, chat completions and models over one engine, with health and metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvweave.engine.api.body import APIError, Body
from kvweave.engine.api.choice import Choice, TextPiece, usage
from kvweave.engine.api.engine_metrics import exposition
from kvweave.engine.api.formats import ChatFormat, CompletionFormat, Format
from kvweave.engine.api.prompt_codec import PromptCodec
from kvweave.engine.api.request_fields import check_fields
from kvweave.engine.engine import Engine
from kvweave.errors import BadCall, BadOption, BadTokens, NeverFits, QueueFull

MOST_BODY_BYTES = 16 << 20
HUNG_UP = "the client has hung up"
DEFAULT_NEW_TOKENS = 1024
"""Tokens of a chat answer, if the request does not say how many."""


class Endpoint:
    """Answers for one model under the name `model`. With an `api_key`, everything but health needs it."""

    def __init__(self, engine: Engine, codec: PromptCodec, model: str, api_key: str | None = None) -> None:
        self.engine, self.model, self.api_key = engine, model, api_key
        self._formats: dict[str, Format] = {
            "/v1/completions": CompletionFormat(codec),
            "/v1/chat/completions": ChatFormat(codec),
        }
        self._codec = codec
        self._started = int(time.time())
        config = engine.model.config.get_text_config(decoder=True)
        self.max_tokens: int | None = getattr(config, "max_position_embeddings", None)

    def app(self) -> Starlette:
        """The ASGI application; at its end the engine is closed."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.engine.close)

        routes = [
            *(Route(path, self._generate, methods=["POST"]) for path in self._formats),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers: dict[Any, Any] = {APIError: _refused, HTTPException: _no_route, Exception: _failed}
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)

    # ---- what is small

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key and not hmac.compare_digest(given.encode(), self.api_key.encode()):
            raise APIError("the API key is missing or wrong", 401, "invalid_api_key")

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        card = {"id": self.model, "object": "model", "created": self._started, "owned_by": "kvweave"}
        if request.path_params:
            self._check_name(request.path_params["name"])
            return JSONResponse(card)
        return JSONResponse({"object": "list", "data": [card]})

    def _check_name(self, name: str) -> None:
        if name != self.model:
            raise APIError(f"there is no model {name!r} here, only {self.model!r}", 404, "model_not_found")

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"} if self.engine.is_running else {"status": "closed"}, self._status)

    @property
    def _status(self) -> int:
        return 200 if self.engine.is_running else 503

    async def _metrics(self, request: Request) -> Response:
        self._check_key(request)
        return PlainTextResponse(exposition(self.engine.stats()))

    # ---- answers

    async def _generate(self, request: Request) -> Response:
        self._check_key(request)
        shape = self._formats[request.url.path]
        body = Body(await _read(request))
        self._check_name(body.get("model", (str,), self.model))
        check_fields(body, shape.fields)
        wants_usage, per_prompt = body.wants_usage, body.num_choices
        choices = await asyncio.to_thread(self._submit, shape, body)
        frame = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}
        if body.flag("stream"):
            frame["object"] = shape.piece_kind
            events = _events(shape, choices, frame, per_prompt if wants_usage else None)
            return EventStream(events, choices)
        pieces = await _unless_gone(request, choices)
        whole = [shape.whole(choice.index, piece) for choice, piece in zip(choices, pieces, strict=True)]
        return JSONResponse({**frame, "object": shape.kind, "choices": whole, "usage": usage(choices, per_prompt)})

    def _submit(self, shape: Format, body: Body) -> list[Choice]:
        """Submit every choice of every prompt; all or none."""
        count, stops, logprobs = body.num_choices, body.stops, shape.logprobs(body)
        tools = shape.tools(body)
        prompts = shape.prompts(body, tools)
        limits = [self._limit(prompt, shape.max_tokens(body)) for prompt in prompts]
        settings = [body.sampling(limit, logprobs, choice) for limit in limits for choice in range(count)]
        choices: list[Choice] = []
        try:
            for number, sampling in enumerate(settings):
                asked = self.engine.submit(
                    prompts[number // count], sampling, priority=body.integer("priority", 0) or 0
                )
                choices.append(Choice(number, asked, self._codec, stops, tools))
        except (BadCall, BadOption, BadTokens, NeverFits, QueueFull) as error:
            for choice in choices:
                choice.request.cancel()
            raise _as_api_error(error) from error
        return choices

    def _limit(self, prompt: list[int], asked: int | None) -> int:
        """Tokens of an answer; those asked for must fit the model's positions, if it has a last one."""
        most = self.max_tokens
        if asked is not None and asked < 1:
            raise APIError(f"max_tokens (or max_completion_tokens) must be at least 1, not {asked}")
        if most is None:
            return self._fitting(len(prompt), DEFAULT_NEW_TOKENS) if asked is None else asked
        if len(prompt) + (1 if asked is None else asked) > most:
            raise APIError(
                f"this model's context is {most} tokens, the prompt has {len(prompt)} and {asked or 1} were asked for",
                code="context_length_exceeded",
            )
        return self._fitting(len(prompt), min(DEFAULT_NEW_TOKENS, most - len(prompt))) if asked is None else asked

    def _fitting(self, num_prompt: int, count: int) -> int:
        """Tokens of an answer of which nobody said how long it may be: as many as there could be pages for, roughly."""
        while count > 1:
            try:
                self.engine.check_fits(num_prompt, count)
            except NeverFits:
                count //= 2
            else:
                break
        return count


class EventStream(StreamingResponse):  # type: ignore[misc]
    """The events of some choices, which are cancelled at its end; even if it never begins, as the client is gone."""

    def __init__(self, events: AsyncIterator[str], choices: list[Choice]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for choice in self._choices:
                choice.request.cancel()


def _as_api_error(error: Exception) -> APIError:
    if isinstance(error, QueueFull):
        return APIError(str(error), 429, "rate_limit_exceeded")
    if isinstance(error, BadCall):
        return APIError(str(error), 503, "server_stopped")
    return APIError(str(error), code="context_length_exceeded" if isinstance(error, NeverFits) else None)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError), "registered for it"
    return JSONResponse(error.to_dict(), error.status)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    told = APIError(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
    return JSONResponse(told.to_dict(), told.status, error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse(_as_failure(error).to_dict(), 500)


def _as_failure(error: Exception) -> APIError:
    return error if isinstance(error, APIError) else APIError(f"the model failed: {error}", 500)


async def _read(request: Request) -> bytes:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY_BYTES:
                raise APIError(f"the body has more than {MOST_BODY_BYTES} bytes", 413)
    except ClientDisconnect as error:
        raise APIError(HUNG_UP, 499) from error
    return bytes(body)


async def _unless_gone(request: Request, choices: list[Choice]) -> list[TextPiece]:
    """The whole choices; cancelled if the client hangs up meanwhile."""
    answers = asyncio.gather(*(choice.whole() for choice in choices))
    try:
        while not answers.done():
            await asyncio.wait([answers], timeout=0.5)
            if not answers.done() and await request.is_disconnected():
                raise APIError(HUNG_UP, 499)
        return await answers
    except Exception as error:
        raise _as_failure(error) from error
    finally:
        for choice in choices:
            choice.request.cancel()
        answers.cancel()
        await asyncio.gather(answers, return_exceptions=True)


async def _events(
    shape: Format, choices: list[Choice], frame: dict[str, Any], per_prompt: int | None
) -> AsyncIterator[str]:
    """Server-sent events of all choices as their text comes; at the end the usage, if it is said how many choices a
    prompt has."""
    queue: asyncio.Queue[tuple[Choice, TextPiece | Exception | None]] = asyncio.Queue()

    async def read(choice: Choice) -> None:
        try:
            async for piece in choice.pieces():
                await queue.put((choice, piece))
            await queue.put((choice, None))
        except Exception as error:
            await queue.put((choice, error))

    readers = [asyncio.create_task(read(choice)) for choice in choices]
    started: set[int] = set()
    left = len(choices)
    try:
        while left:
            choice, piece = await queue.get()
            if isinstance(piece, Exception):
                yield _event(_as_failure(piece).to_dict())
                return
            if piece is None:
                left -= 1
            else:
                shown = shape.piece(choice.index, piece, choice.index not in started)
                started.add(choice.index)
                yield _event({**frame, "choices": [shown]})
        if per_prompt:
            yield _event({**frame, "choices": [], "usage": usage(choices, per_prompt)})
        yield "data: [DONE]\n\n"
    finally:
        for task in readers:
            task.cancel()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
